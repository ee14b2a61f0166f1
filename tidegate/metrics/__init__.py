"""What happened and how long it took: a timeline per request, and Prometheus metrics derived from timelines alone."""
