"""AMD's aiter, where it is installed as a package: its Triton kernel for ragged logits."""

from bench.peers.base import Check, TorchPeer, library, needs_gpu


def ragged(error: Check) -> TorchPeer:
    """Called as SGLang calls it: what lies outside of a row's window is not written."""

    def make(torch, shared):
        def bind(varied):
            q8, weights, k8, k_scale, starts, ends = varied
            needs_gpu(q8, "aiter")
            module = library("aiter.ops.triton.fp8_mqa_logits", "amd-aiter")
            return lambda: module.fp8_mqa_logits(q8, k8, k_scale, weights, starts, ends)

        return bind

    return TorchPeer(make, error=error, packages=("amd-aiter", "triton", "torch"))
