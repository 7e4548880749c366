"""What XLA's compilers make of each kernel, for chips that this machine does not have.

``python -m jax_mla.aot`` compiles every kernel at the shapes it serves with, for gfx942, gfx950 and sm_90, and prints
what came out. The parts are of use by themselves:

- ``compiler.inspect(f, *args, chip=CHIPS["gfx942"])``: any jitted function's kernels, and their machine code.
- ``executable.read``: what is needed to launch a kernel without XLA: its code object, grid, threads, shared memory, and
  which buffers it takes in which order.
- ``code.read``: registers, spills and instructions of a code object; ``cdna`` and ``sass`` decode them.

The compilers are those of the wheels ``jax-rocm7-pjrt`` and ``jax-cuda13-pjrt``, of JAX's own version; ``plugins`` says
where they lie and what ROCm's needs beside it. Nothing here runs a kernel.
"""
