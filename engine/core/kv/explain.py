"""Why a prompt hit as far as it did, and what pages are for. For explanation alone: decides nothing."""

from itertools import islice

from engine.core.kv.block import Block, Root, RootKey
from engine.core.kv.events import EvictionMemory
from engine.core.kv.prefix_tree import MAX_EXAMINED, PrefixTree
from engine.request import Request


def reason(request: Request, blocks: list[Block], num_tokens: int, tree: PrefixTree, evicted: EvictionMemory) -> str:
    """What kept a match of `num_tokens` tokens, `blocks` of them whole, from going on. See `kv/events.py`."""
    if request.wants_scores:
        return "prompt_logprobs"
    if num_tokens == len(request.token_ids) - 1:
        return "whole_prompt"
    size = tree.block_size
    start = len(blocks) * size
    wanted = tuple(request.token_ids[start : start + size])
    key = RootKey(request.salt, request.adapter)
    parent: Block | None = blocks[-1] if blocks else tree.roots.get(key)
    if evicted.holds(parent or Root(key), wanted):
        return "evicted"
    if num_tokens == 0:
        others = islice((root for other, root in tree.roots.items() if other != key), MAX_EXAMINED)
        if any(wanted in root.children for root in others):
            return "other_salt"
    if parent is None:
        return "nothing_cached"
    return "diverged" if parent.heads else "end_of_cache"


def purpose(request: Request) -> str:
    """What the pages that a request is given next are for. See `kv/events.py`."""
    computed = request.num_computed
    if computed >= max(request.num_prompt, request.num_reached, request.num_refreshed):
        return "generation"
    if request.num_reached <= computed < request.num_refreshed:
        return "refresh"
    return "recomputation" if request.num_preemptions else "prompt"
