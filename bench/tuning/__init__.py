"""Which route and which tile is ours: contests of our own kernels, as `bench gpu` measures them.

Once the choice of an implementation compares candidates, times them and remembers what it found
(issue 32), `products.route_entries` and `pointwise` say nothing more and go. Tiles are within an
implementation: `product_tiles` and `attention_tiles` stay until tables of tiles go the same way.
"""
