from docs.make_axes import PAGE, page

from apoptosis.structure.rules import RULES


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/make_axes.py"


def test_every_operation_is_on_it():
    text = page()
    for name in RULES:
        assert f"`{name.partition('.')[0]}`" in text
