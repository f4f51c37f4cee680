"""Re-exports what the module `sharding` of an exported package contains: the arithmetic of shards.

`write_package.py` writes that module from the sources of these functions.
"""

from autopart.ir.layout import is_zigzag, num_sections, section_sizes, shard_sizes
from autopart.ir.sharding import DimSharding, _piece

SOURCES = (is_zigzag, num_sections, section_sizes, shard_sizes, _piece, DimSharding)

__all__ = ["SOURCES", "DimSharding"]
