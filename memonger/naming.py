"""Names that nothing else has."""


def fresh(base: str, taken: set[str]) -> str:
    """``base``, or where it is taken ``base#2`` and so on. It is taken from then on."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    taken.add(name)
    return name
