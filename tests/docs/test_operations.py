from docs.make_operations import PAGE, page

from apoptosis.curvature import RULES


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/make_operations.py"


def test_every_operation_is_on_it():
    text = page()
    for name in RULES:
        assert f"`{name}`" in text
