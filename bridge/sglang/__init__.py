"""jax_mla as an attention backend of SGLang, from outside SGLang's tree.

- ``plugin``: the entry point; registers ``--attention-backend jax_mla``. Imports nothing heavy.
- ``contract``: the SGLang version and the names that all of this holds on to.
- ``arguments``: what of SGLang's command line cannot be served, and the switches that must be off.
- ``cpu``: everything that SGLang lacks on a machine without a GPU; inert on one with a GPU.
- ``backend``: ``JaxMLABackend``, one layer's attention over SGLang's KV pool.
- ``metadata``: what a batch is, as tensors, once per batch.
- ``indexer``: the lightning indexer's forward, on SGLang's own ``Indexer`` modules.
- ``prepare``: what prefill launches, built before the first request.
- ``cache``: the layouts of SGLang's pools, and who writes to them.

Paths like ``sglang/srt/...`` in comments are those of SGLang 0.5.23.
"""
