"""``python -m bench engine``: SGLang's engine on this machine's GPU with our backend, lane by lane and graph by graph.

Each case is an engine in a process of its own, over the same prompts. What must be equal is compared bit for bit, what
may differ by rounding with transformers, and what a token takes is timed.
"""
