"""One file per feature around the reducer: precision, buffers, uneven inputs, distributed autograd, in-backward steps."""
