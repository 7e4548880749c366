"""The only place that knows torch and SGLang. ``dlpack`` exchanges memory, ``sglang`` serves, ``doctor`` looks."""
