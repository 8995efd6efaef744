"""The toy assistants are trained on what transformers computes, and are served at the positions that the table names."""

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.acceptance import assistant_position, toy_assistant  # noqa: E402
from benchmarks.report import results  # noqa: E402

LENGTH = 45  # longer than a window


@pytest.mark.parametrize("by", [0, -1])
@torch.no_grad()
def test_drafts_in_training_are_those_of_transformers(by):
    """Behind a short text and behind one that is longer than the window, with transformers' own masks."""
    torch.manual_seed(3)
    config = toy_assistant.text_config(16, 50)
    target = toy_assistant.with_even_scores(toy_assistant.Gemma4ForCausalLM(config)).eval()
    assistant = toy_assistant.new_assistant(target, seed=4).eval()
    for module in (target, assistant):
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    seen = toy_assistant.read(target, torch.randint(3, 50, (1, LENGTH)))
    found = torch.stack(list(toy_assistant.drafts(assistant, target, seen, by, K := 3)))
    for newest in (3, LENGTH - K):
        shared = {kind: (k[:, :, :newest], v[:, :, :newest]) for kind, (k, v) in seen.shared.items()}
        hidden = seen.hidden[:, newest - 1 : newest]
        for i in range(K):
            token = seen.tokens[:, newest + i : newest + i + 1]
            out = assistant(
                inputs_embeds=torch.cat([target.get_input_embeddings()(token), hidden], dim=-1),
                position_ids=torch.tensor([[newest + by]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            hidden = out.last_hidden_state
            torch.testing.assert_close(found[i][:, newest - 1], out.logits[:, 0], rtol=1e-4, atol=1e-5)


def test_a_smoke_run_measures_all_pairs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["assistant_position", "--smoke", "--json", str(tmp_path / "out.json")])
    assistant_position.main()
    result = results.read(tmp_path / "out.json")
    assert list(result.measured) == [
        assistant_position.key_of(trained, served) for trained in (0, -1) for served in (0, -1, 1, -16)
    ]
    assert all(1 <= length <= 5 for length in result.measured.values())
    assert len(set(result.measured.values())) == 8  # another position gives other drafts
    assert np.shape(result.details["trained at p - 1, served at p + 1"]["lengths"]) == (1, 2, 2)
    assert result.settings["smoke"]
    assert capsys.readouterr().out.count("\n| p") == 8


def test_differences_are_those_of_the_same_prompts():
    same, over = np.array([[[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]]), np.full((1, 4, 2), 0.5)
    pairs = {(0, 0): (same, over), (0, -1): (same - 0.25, over + 0.125)}
    table = assistant_position.comparison({key: assistant_position.Pair(*pair) for key, pair in pairs.items()})
    lengths = "1.750 ± 0.577 | -0.2500 ± 0.0000 | 1.750 ± 0.000 | -0.2500 ± 0.0000"
    assert table.splitlines()[-1] == f"| p | p - 1 | {lengths} | 0.625 ± 0.000 | +0.1250 ± 0.0000 |"
