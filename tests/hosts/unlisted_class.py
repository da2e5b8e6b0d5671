"""A class that no allow-list knows."""


class Stranger:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Stranger({self.number})"
