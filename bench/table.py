"""Tables as bench/RESULTS.md has them, printed line by line."""


def head(*columns: object) -> None:
    """The first two lines, after an empty one."""
    print(f"\n| {' | '.join(map(str, columns))} |\n{'|---' * len(columns)}|", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
