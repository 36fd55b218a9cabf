from typing import Any

class CONDRegular:
    cond: Any
    def __init__(self, cond: Any) -> None: ...

class CONDCrossAttn(CONDRegular): ...
