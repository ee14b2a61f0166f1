"""What each tenant has used, kept in a SQLite file."""
