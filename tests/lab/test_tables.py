from mcomb.lab.tables import TABLE_WIDTH, columns


def test_columns_align_words_left_and_numbers_right():
    assert columns([("", "a"), ("long", "1.5"), ("x", "22.25")]) == "          a\nlong    1.5\nx     22.25"


def test_columns_splits_wide_tables_evenly():
    rows = [("", *(f"column {i}".rjust(30) for i in range(4))), ("label", *(f"{i}.5" for i in range(4)))]
    text = columns(rows)
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    parts = [[line.split() for line in part.splitlines()] for part in text.split("\n\n")]
    assert parts == [
        [["column", "0", "column", "1"], ["label", "0.5", "1.5"]],
        [["column", "2", "column", "3"], ["label", "2.5", "3.5"]],
    ]
    both = columns([(row[0], "x", *row[1:]) for row in rows], labels=2)
    assert [line.split()[:2] for line in both.splitlines()[1::3]] == [["label", "x"]] * 2


def test_columns_keeps_table_with_one_wide_cell():
    assert columns([("x" * 200, "1", "2")]) == "x" * 200 + "  1  2"
