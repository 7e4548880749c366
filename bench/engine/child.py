"""One case in a process of its own: ``python -m bench.engine.child NUMBER MODEL RESULT``."""

import json
import sys
import time
from pathlib import Path

from bench.engine.case import CASES, NEW_TOKENS, TIMED_TOKENS, Case, prompts


def main(case: Case, model: str, result: Path) -> None:
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(model_path=model, **case.arguments())
    found: dict = dict(up_s=time.perf_counter() - start)

    def ask(ids, tokens: int = NEW_TOKENS, **more):
        """Greedy."""
        sampling = dict(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        return engine.generate(input_ids=ids, sampling_params=sampling, **more)

    def seconds(*arguments) -> float:
        begun = time.perf_counter()
        ask(*arguments)
        return time.perf_counter() - begun

    try:
        asked = prompts(case.tiny.vocab_size)
        found["first_request_s"] = seconds(asked[-1])
        how = dict(return_logprob=True, logprob_start_len=0)
        found["alone"] = [answer(ask(ids, **how)) for ids in asked]
        found["batch"] = [answer(x) for x in ask(asked, **how)]
        if case.radix:
            again = [ask(ids) for ids in asked]
            found["again"] = [x["output_ids"] for x in again]
            found["cached_tokens"] = [x["meta_info"]["cached_tokens"] for x in again]
        for name, ids in (("one", asked[4]), ("batch", [asked[4]] * len(asked))):
            seconds(ids, TIMED_TOKENS)
            took = min(seconds(ids, TIMED_TOKENS) - seconds(ids, 1) for _ in range(2))
            found[f"ms_per_step_{name}"] = 1e3 * took / (TIMED_TOKENS - 1)
    finally:
        engine.shutdown()
    result.write_text(json.dumps(found))


def answer(said: dict) -> dict:
    """Tokens; natural log-probabilities of the prompt's (all but the first) and of those."""
    meta = said["meta_info"]
    prompt, new = (
        [x[0] for x in meta[name]][skip:] for name, skip in (("input_token_logprobs", 1), ("output_token_logprobs", 0))
    )
    return dict(tokens=said["output_ids"], prompt=prompt, new=new)


if __name__ == "__main__":
    main(CASES[int(sys.argv[1])], sys.argv[2], Path(sys.argv[3]))
