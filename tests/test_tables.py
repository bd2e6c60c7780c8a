"""Tables of a person's own: columns of numbers and of text, what is missing, and other files with labels."""

import numpy as np
import pytest
from PIL import Image

from bilax.datasets.labelled import csv_bytes, read_embeddings, read_labelled, shown_row, write_cleaned
from bilax.datasets.tables import CHUNK, Texts, columns_of, encoder
from bilax.files import DataError

GOOD = "id,size,colour,kind\n1,0.5,red,a\n2,1.5,blue,b\n3,2.5,red,a\n"


def written(folder, text, name="a.csv"):
    path = folder / name
    path.write_text(text)
    return path


def test_numbers_stay_and_texts_become_categories(tmp_path):
    data = read_labelled(written(tmp_path, GOOD), "kind", drop=("id",))
    np.testing.assert_array_equal(data.inputs, [[0.5, 1, 0], [1.5, 0, 1], [2.5, 1, 0]])
    assert data.labels.tolist() == ["a", "b", "a"]
    assert shown_row(data, 1) == [("size", "1.5"), ("colour", "blue")]
    other = written(tmp_path, "kind,colour,size,id\nb,blue,7,9\na,green,8,9\n", "b.csv")
    # Another order of columns, and a text that the data do not have.
    np.testing.assert_array_equal(read_labelled(other, "kind", ("id",), data).inputs, [[7, 0, 1], [8, 0, 0]])


def test_a_column_that_turns_out_to_be_text_late_is_read_as_text(tmp_path):
    rows = "".join(f"{i % 7},{i % 2}\n" for i in range(CHUNK + 5))
    data = read_labelled(written(tmp_path, f"a,y\n{rows}many,1\n"))
    column = data.columns["a"]
    assert isinstance(column, Texts)
    assert column.names == (*"0123456", "many")
    assert data.inputs.sum() == CHUNK + 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,label\n1,x\n,y\n", r"row 2, column 'a': the value is missing"),
        ("a,label\n1,x\n2,NA\n", r"row 2, column 'label': the value is missing"),
        ("a,label\n1,x\n2\n", "row 2 has 1 cells, but there are 2 columns"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ("a,b\n1,2\n", "has no column named label, labels, target, class, y: say by --label"),
        ("a,label\n", "holds no rows"),
        ("", "is empty"),
        ("label\nx\ny\n", "has no column beside the label"),
    ],
)
def test_tables_that_cannot_be_used_are_refused_with_the_place(text, said, tmp_path):
    with pytest.raises(DataError, match=said):
        read_labelled(written(tmp_path, text))


def test_other_mistakes_are_named(tmp_path):
    path = written(tmp_path, GOOD)
    with pytest.raises(DataError, match="has no column 'sort': say by --label"):
        read_labelled(path, "sort")
    with pytest.raises(DataError, match="no column 'sort' to leave out"):
        read_labelled(path, "kind", ("sort",))
    data = read_labelled(path, "kind")
    with pytest.raises(DataError, match=r"lacks the columns \['colour', 'id', 'size'\] and has \['b'\] besides"):
        read_labelled(written(tmp_path, "b,kind\n1,a\n", "c.csv"), "kind", like=data)
    with pytest.raises(DataError, match="nor does it end in"):
        read_labelled(written(tmp_path, "", "a.txt"))
    names = "".join(f"name{i},a\n" for i in range(300))
    with pytest.raises(DataError, match="300 different texts"):
        read_labelled(written(tmp_path, f"who,label\n{names}", "d.csv"))


def test_a_cleaned_copy_keeps_all_columns_of_the_rows_that_stay(tmp_path):
    path = written(tmp_path, GOOD)
    data = read_labelled(path, "kind", ("id",))
    copy = write_cleaned(path, tmp_path / "out", data, np.array([True, False, True]), np.array(["a", "b", "c"]))
    assert copy.read_text().split() == ["id,size,colour,kind", "1,0.5,red,a", "3,2.5,red,c"]
    assert path.read_text() == GOOD


def test_parquet_is_read_and_copied_as_csv_is(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(written(tmp_path, GOOD))
    frame.to_parquet(tmp_path / "a.parquet")
    first, second = read_labelled(tmp_path / "a.csv", "kind"), read_labelled(tmp_path / "a.parquet", "kind")
    np.testing.assert_array_equal(first.inputs, second.inputs)
    np.testing.assert_array_equal(first.labels, second.labels)
    copy = write_cleaned(tmp_path / "a.parquet", tmp_path, second, np.array([True, False, True]), second.labels)
    assert pandas.read_parquet(copy)["id"].tolist() == [1, 3]
    encode = encoder("frame", columns_of("frame", frame.drop(columns="kind")))
    np.testing.assert_array_equal(encode("frame", columns_of("frame", frame.drop(columns="kind"))), first.inputs)
    frame.loc[1, "size"] = np.nan
    with pytest.raises(DataError, match="row 2, column 'size': the value is missing"):
        columns_of("frame", frame)


def test_pictures_in_folders_and_embeddings(tmp_path):
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("L", (5, 4), shade).save(tmp_path / name / f"{i}.png")
    data = read_labelled(tmp_path, size=6)
    assert data.inputs.shape == (4, 6, 6, 3)
    assert data.labels.tolist() == ["cat", "cat", "dog", "dog"]
    assert data.is_picture
    copy = write_cleaned(tmp_path, tmp_path / "out", data, np.array([True] * 3 + [False]), data.labels)
    assert len(copy.read_text().split()) == 4
    np.save(tmp_path / "e.npy", np.eye(4, 3))
    assert read_embeddings(tmp_path / "e.npy", 4).shape == (4, 3)
    with pytest.raises(DataError, match=r"shape \(4, 3\), but there are 5 rows"):
        read_embeddings(tmp_path / "e.npy", 5)


def test_cells_with_commas_and_quotes_survive():
    assert csv_bytes([("a,b", 'c"d')]) == b'"a,b","c""d"\r\n'
