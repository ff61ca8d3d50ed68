# Triton runs kernels from their source. What pyright infers of its Python, such as NoReturn, differs from run to run.
from typing import Any

def __getattr__(name: str) -> Any: ...
