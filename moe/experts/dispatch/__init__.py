"""Dispatchers send tokens to their chosen experts and bring the results back. One file each, all with the same results.

    local           all experts are here                           fused, nothing is sent
    all_to_all      uneven: kept rows only                         2 k (ep - 1) / ep rows a token, forward
      chunked       its experts in chunks                          one chunk computes while the next is sent
    padded          equal blocks of capacity rows                  also sends empty slots; all messages have equal sizes
    all_gather      all tokens to all ranks, reduce-scatter        2 (ep - 1) rows a token; for small ep
    hierarchical    within the node, then between nodes            fewer, larger messages between nodes

Only the dispatcher knows which rank holds an expert. Memory is proportional to routed rows (tokens * choices * width). Source: GShard
(arXiv 2006.16668, section 3.2). dispatcher.py has the interface, catalog.py the names, network.py the held experts over etp.
"""
