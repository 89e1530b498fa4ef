"""The tests: laws of `moe` and `parallel`, on one process and on gloo ranks. Nothing outside imports them."""
