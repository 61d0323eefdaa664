from rich.console import Console

from fedkeel.records.histogram import Histogram
from fedkeel.report.partition_table import partition_table


def shown(names, classes, width):
    console = Console(width=width)
    with console.capture() as capture:
        histogram = [[k + 1] * classes for k in range(len(names))]
        sizes = [sum(row) for row in histogram]
        labels = [str(y) for y in range(classes)]
        console.print(partition_table(Histogram.of_rows(histogram), sizes, names, labels))
    return capture.get().splitlines()


def test_many_classes_leave_names_and_numbers():
    lines = shown(["north", "south"], 26, 80)
    assert lines[1].split()[:3] == ["client", "examples", "classes"]
    assert lines[4].split()[:3] == ["south", "52", "26"]
    assert all(len(line) <= 80 for line in lines)


def test_a_long_name_leaves_the_classes():
    assert shown(["the northern hospital of the city", "x"], 3, 80)[3].count("\u2592") == 6


def test_few_classes_have_whole_names():
    def head(labels):
        table = partition_table(Histogram.of_rows([[3] * len(labels)]), [6], ["a"], labels)
        console = Console(width=80)
        with console.capture() as capture:
            console.print(table)
        return capture.get().splitlines()

    lines = head(["no", "yes"])
    assert lines[1].split()[3:5] == ["no", "yes"]
    assert lines[1].index("yes") == lines[3].rindex("\u2593\u2593") - 1
    assert head(["a long name", "another"])[1].split()[3:] == [
        "a",
        "long",
        "name",
        "another",
        "size",
    ]
    assert head([f"class{k}" for k in range(12)])[1].split()[3:5] == ["cl", "cl"]


def test_a_name_is_text():
    assert shown(["[/red]"], 2, 80)[3].split()[0] == "[/red]"
