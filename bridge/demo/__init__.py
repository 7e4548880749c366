"""`python -m bridge demo`: a tiny DeepSeek-V3.2 served by the real SGLang, measured against transformers.

tiny     the checkpoint: random weights of a fixed seed, config.json with Hugging Face's names, byte-level tokenizer
server   the real `python -m sglang.launch_server` as a child process: started, waited for, always stopped
hf       transformers' own deepseek_v32 on the same tokens, plain or quantised as the cache quantises
compare  the table: SGLang's log-probabilities and selected indices against transformers', each with its bound
app      the command that runs the four
"""

from pathlib import Path

BUILD = Path("build").resolve()
"""What the demo leaves behind: checkpoints in `tiny/`, the servers' logs in `demo/`. Of the folder it is run in."""
