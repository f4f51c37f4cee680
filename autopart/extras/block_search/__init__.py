"""Search for the best recomputation, ZeRO sharding and stage of each block (`autopart.search_blocks`)."""

from autopart.extras.block_search.choose_blocks import BlockSearch, search_blocks

__all__ = ["BlockSearch", "search_blocks"]
