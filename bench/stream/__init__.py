"""The stream lane beside the jit lane, on a GPU: ``python -m bench stream``.

- ``layer``: a decode layer's attention as calls on tensors that change from step to step; knows nothing of JAX.
- ``ops``: calls of each of ``bridge.ops.FUNCTIONS``.
- ``measure``: what is compared and timed.
- ``alone``: a process of its own, which runs the layer from programs that are kept, where JAX can't be imported.
"""

PARTS = ("functions", "replays", "layers", "starts")
"""What ``python -m bench stream --parts`` takes."""
