from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from tidegate.text.template_sandbox import BoundedEnvironment, TemplateLimitError, render_bounded

NEVER_S = 1e9


def render(source: str, *, max_steps: int = 20_000, max_chars: int = 200_000, **variables: Any) -> str:
    """With bounds on steps and characters only, so that the outcome does not depend on the machine."""
    template = BoundedEnvironment().from_string(source)
    return render_bounded(template, variables, max_steps=max_steps, max_chars=max_chars, max_time_s=NEVER_S)


GROW = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = GROWN %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) if a > range(9999)|list|length %}{% endfor %}" * 30,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% for a in range(9999) %}{{ a.bit_length() }}{{ a|string }}{{ a * a }}{% endfor %}",
        GROW.replace("GROWN", "n.x ~ n.x"),
        GROW.replace("GROWN", "n.x + n.x"),
        GROW.replace("GROWN", "n.x * 3"),
        GROW.replace("GROWN", "[n.x, n.x]|join"),
        GROW.replace("GROWN", "'x'.join([n.x, n.x])"),
        GROW.replace("GROWN", "n.x.replace('a', 'aaaa')"),
        GROW.replace("GROWN", "n.x|replace('a', 'aaaa')"),
        GROW.replace("GROWN", "'%s%s' % (n.x, n.x)"),
        GROW.replace("GROWN", "'{0}{0}'.format(n.x)"),
        GROW.replace("GROWN", "'%s%s'|format(n.x, n.x)"),
        GROW.replace("GROWN", "n.x|list + n.x|list"),
        "{% set x %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(9999) %}{{ objects }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% for i in range(999) %}{{ big|upper|length }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ ['a'] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.center(width=1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a'|indent(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ [[1]]|tojson(indent=1000000000) }}",
        "{{ [1, 2]|tojson(separators=(big, big)) }}",
    ],
)
def test_a_template_that_runs_or_grows_without_end_is_stopped(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        render(source, big="x" * 10_000, objects=[{"key": "x" * 10_000}])


def test_printed_objects_are_charged_before_they_pile_up() -> None:
    class Printed:
        times = 0

        def __str__(self) -> str:
            self.times += 1
            return "x" * 10_000

    printed = Printed()
    with pytest.raises(TemplateLimitError):
        render("{% set x %}{% for i in range(999) %}{{ it }}{% endfor %}{% endset %}", max_chars=100_000, it=printed)
    assert printed.times <= 11


def test_endless_recursion_is_stopped() -> None:
    with pytest.raises(RecursionError):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_a_render_ends_at_its_deadline() -> None:
    readings = iter(range(1000))
    template = BoundedEnvironment().from_string("{% for i in range(99999) %}{% endfor %}")
    with pytest.raises(TemplateLimitError, match="too long"):
        render_bounded(template, {}, max_time_s=5.0, now=lambda: float(next(readings)))
    assert next(readings) < 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
        "{% include 'secret' %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source: str) -> None:
    with pytest.raises((SecurityError, UndefinedError, TypeError)):
        render(source, messages=["a"])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for x in items %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ x }} {% endfor %}",
            "1False2a 2True2b ",
        ),
        ("{% for x in items %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}", "ba"),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for x in items if x != 'a' %}{{ x }}{% endfor %}", "b"),
        ("{% for x in items %}{% if x == 'a' %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}", "b"),
        ("{% for x in [[1], [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"),
        ("{{ {'b': '<é>', 'a': [1]}|tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ items|map('upper')|join(', ') }} {{ items|selectattr('x', 'defined')|list|length }}", "A, B 0"),
        ("{{ ' a '|trim }}{{ ' a '.strip() }}{{ 'x%s' % 1 }}{{ '{} {a}'.format(1, a=2) }}{{ 7 % 4 }}", "aax11 23"),
        ("{% set ns = namespace(n=0) %}{% for x in items %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        (
            "{% macro m(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}{% set s %}{{ m(2, 3) }}{% endset %}{{ s }}",
            "1d23",
        ),
        ("{% generation %}{{ items[0] }}{% endgeneration %}", "a"),
        ("{%- if true %}\n  yes\n{% endif %}\n", "  yes\n"),
        ("{{ missing }}|{{ none }}|{{ items[-1:][0] }}|{{ items|first }}|{{ 2 ** 5 }}", "|None|b|a|32"),
    ],
)
def test_ordinary_templates_render_as_jinja_does(source: str, expected: str) -> None:
    assert render(source, items=["a", "b"]) == expected
