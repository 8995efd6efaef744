"""What a request has begun of the model's message goes on as what it is, reasoning or the answer, in every format."""

import functools

import pytest
from chats import chat_llm
from marker_tokenizer import marker_tokenizer
from openai_server import service_of
from tiers import in_tiers
from transcripts import merged

from jspec.serving.anthropic.conversation import chat_of
from jspec.serving.anthropic.protocol import MessagesRequest
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.generation.protocol import ChatRequest, parsed, read_fields
from jspec.serving.http.auth import Tenant
from jspec.text.parsers.events import Content, Reasoning
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.registry import REASONING_FORMATS, reasoning_format

# How templates of public models write a turn: the format, what is around the user's text, what comes before the model's, and
# behind it, what comes before an old answer, and how a new one is opened.
IM = ("<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n")
WHALE, GLM = ("<｜User｜>", "", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"), ("<|user|>\n", "", "<|assistant|>", "")
KIMI = ("<|im_user|>user<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>")
SEED = ("<seed:bos>user\n", "<seed:eos>", "<seed:bos>assistant\n", "<seed:eos>")
GEMMA = ("<|turn>user\n", "<turn|>\n", "<|turn>model\n", "<turn|>\n")
HARMONY = ("<|start|>user<|message|>", "<|end|>", "<|start|>assistant", "<|end|>")
MODELS = {
    "Qwen3": ("qwen3", *IM, "", ""),
    "Qwen3, last turn": ("qwen3", *IM, "<think>\n\n</think>\n\n", ""),
    "Qwen3.5": ("qwen3", *IM, "", "<think>\n"),
    "MiMo": ("mimo", *IM, "", "<think>\n\n</think>\n\n"),
    "DeepSeek-R1": ("deepseek_r1", *WHALE, "", "<think>\n"),
    "DeepSeek-V3.1": ("deepseek_v3", *WHALE, "</think>", "</think>"),
    "DeepSeek-V3.1, thinking": ("deepseek_v3", *WHALE, "", "<think>"),
    "DeepSeek-V4": ("deepseek_v4", *WHALE, "", "<think>"),
    "GLM-4.5": ("glm45", *GLM, "\n<think></think>\n", ""),
    "GLM-4.7": ("glm47", *GLM, "</think>", "<think>"),
    "Kimi-K2": ("kimi_k2", *KIMI, "<think></think>", ""),
    "MiniMax-M2": ("minimax_m2", "]~b]user\n", "[e~[\n", "]~b]ai\n", "[e~[\n", "", "<think>\n"),
    "Seed-OSS": ("seed_oss", *SEED, "", ""),
    "Gemma-4": ("gemma4", *GEMMA, "", ""),
    "Magistral": ("mistral", "[INST]", "[/INST]", "", "</s>", "", ""),
    "gpt-oss": ("openai_gptoss", *HARMONY, "<|channel|>final<|message|>", ""),
    "gpt-oss, raw": ("openai_gptoss", *HARMONY, "", ""),
    "of no known turns": ("deepseek_r1", "Human: ", "\n", "Assistant: ", "\n", "", "<think>\n"),
}
HARMONY_THEN = "<|start|>assistant<|channel|>final<|message|>"
SIZES = (1, 30)  # sentences, of 25 tokens or more


def template(model):
    _, user, user_end, own, own_end, before, opened = map(repr, MODELS[model])
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ "
        + f"{own} + {before} + m.content + {own_end} }}}}{{% else %}}{{{{ {user} + m.content + {user_end} }}}}"
        + f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {own} + {opened} }}}}{{% endif %}}"
    )


@functools.cache
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=marker_tokenizer().fast, eos_token="<|im_end|>")


def service(model):
    llm = chat_llm(tokenizer(), drafts=False, max_len=4096)
    return service_of(llm, chat_template=template(model), reasoning_parser=MODELS[model][0], tool_parser="llama3_json")


CALL = [{"name": "f", "input_schema": {"type": "object"}}]


def turn_of(own, endpoint, begun, **fields):
    """The turn of a request that has begun an answer, through one of the endpoints that take one."""
    messages = [{"role": "user", "content": "Which capital?"}, {"role": "assistant", "content": begun}]
    messages = messages if begun else messages[:1]
    body = {"model": "m", "messages": messages, "max_tokens": 9, **fields}
    if endpoint == "messages":
        body, _ = chat_of(read_fields(MessagesRequest, {"tools": CALL, **body}, own.most_entries))
    elif begun:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    turn = ChatTurn(own, parsed(ChatRequest, body, own.most_entries), Tenant(b"", ""))
    return turn, turn.settings().copies[0]


def read(turn, text):
    """The reasoning and the content of a completion, the same however it is divided."""
    tokens = marker_tokenizer().encode(text)
    parser, parts = turn.output().parser, turn.output().parser
    whole = merged(parser.feed(text, tokens) + parser.finish())
    pieces = [marker_tokenizer().decode([token], skip_special_tokens=False) for token in tokens]
    steps = [event for piece, token in zip(pieces, tokens, strict=True) for event in parts.feed(piece, [token])]
    assert merged(steps + parts.finish()) == whole
    assert {type(event) for event in whole} <= {Reasoning, Content}
    return tuple("".join(e.text for e in whole if isinstance(e, kind)) for kind in (Reasoning, Content))


def beginnings(model, size):
    """What a request may begin, and whether it leaves reasoning open."""
    form = reasoning_format(MODELS[model][0])
    start, end, harmony = form.start, form.end, model.startswith("gpt-oss")
    said, end = "It is Paris in France. " * size, end + (HARMONY_THEN if harmony else "")
    if model == "gpt-oss, raw":
        return {
            "open": (start + said, True),
            "ended": (f"{start}{said}{end}So", False),
            "answer": (f"{HARMONY_THEN[18:]}{said}", False),
        }
    if harmony:  # whose template takes no markers there
        return {"answer": (said, False)}
    return {
        "answer": (said, False),
        "answer with a mention": (f"{said}The tag {start}opens.", False),
        "answer with both": (f"{said}Write {start}x{end} first.", False),
        "open": (f"{start}\n{said}", True),
        "open again": (f"{start}x{end}\n{start}{said}", True),
        "ended": (f"{start}\n{said}\n{end}\n\nThe answer is", False),
        "ended alone": (f"{start}{said}{end}\n\n", False),
    }


@pytest.mark.parametrize("endpoint", ["chat", "messages"])
@pytest.mark.parametrize(
    "model",
    in_tiers(
        MODELS,
        test=(
            "Qwen3",
            "Qwen3.5",
            "DeepSeek-V3.1",
            "Gemma-4",
            "Magistral",
            "gpt-oss",
            "gpt-oss, raw",
            "of no known turns",
        ),
    ),
)
def test_a_begun_message_goes_on_as_what_it_is(model, endpoint):
    own, form = service(model), reasoning_format(MODELS[model][0])
    end = form.end + (HARMONY_THEN if model.startswith("gpt-oss") else "")
    budget = (
        {"thinking_token_budget": 5} if endpoint == "chat" else {"thinking": {"type": "enabled", "budget_tokens": 5}}
    )
    for size in SIZES:
        for name, (begun, is_open) in beginnings(model, size).items():
            turn, params = turn_of(own, endpoint, begun, **budget)
            assert own.decoded(turn.prompt).rstrip().endswith(begun.strip()), name
            assert params.thinking_budget.begun is is_open, (name, size)
            text = f"so it is.{end}Berlin." if is_open else " Berlin, said so."
            assert read(turn, text) == (("so it is.", "Berlin.") if is_open else ("", text)), (name, size)
            if not is_open and form is not reasoning_format("openai_gptoss"):  # a later mention of a marker is text
                text = f" Berlin{form.end} and {form.start}."
                assert read(turn, text) == ("", text), (name, size)


@pytest.mark.parametrize("model", in_tiers(MODELS, test=("Qwen3", "Qwen3.5", "DeepSeek-V3.1", "gpt-oss")))
def test_a_form_is_that_of_what_follows(model):
    """Behind a begun answer it comes at once, and behind open reasoning when that has ended."""
    own, form = service(model), reasoning_format(MODELS[model][0])
    for size in SIZES:
        for name, (begun, is_open) in beginnings(model, size).items():
            _, params = turn_of(own, "chat", begun, structured_outputs={"choice": ["yes", "no"]})
            preamble = params.structured_outputs.preamble
            assert (preamble is not None) is is_open, (name, size)
            assert preamble is None or str(own.marker_tokens.ids.get(form.end, form.end)) in preamble


@pytest.mark.parametrize("model", MODELS)
def test_a_message_that_is_not_begun_is_as_the_template_opens_it(model):
    form, opened = reasoning_format(MODELS[model][0]), MODELS[model][-1]
    said = None if not opened else not opened.strip().endswith(form.end)
    turn, params = turn_of(service(model), "chat", "", thinking_token_budget=5)
    assert params.thinking_budget.begun is bool(said)
    text = f"so{form.end}Berlin." if form is not reasoning_format("openai_gptoss") else "so<|return|>"
    thinks = form.open if said is None else said
    assert read(turn, text)[0] == ("so" if thinks else "")


def counted(turn, tokens, shows):
    """How many of these tokens count as reasoning."""
    output = turn.output(shows)
    blocks, parser = output.blocks, output.parser
    text = marker_tokenizer().decode(tokens, skip_special_tokens=False)
    list(blocks.add(parser.feed(text, tokens) + parser.finish(), ended=True))
    return turn.num_reasoning_tokens(blocks, tokens)


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_reasoning_is_counted_to_its_first_end(model, shows):
    """The count is exact, whether the marker is one token, as most are, or many, as that of Seed-OSS is here."""
    form, harmony = reasoning_format(MODELS[model][0]), model.startswith("gpt-oss")
    turn, _ = turn_of(service(model), "chat", "")
    opened = MODELS[model][-1].strip().endswith(form.start) and MODELS[model][-1] != ""
    begin = "" if opened else form.start
    thought, more = f"{begin}so it is.{form.end}", (HARMONY_THEN if harmony else "\n\n") + "It ends with "
    if MODELS[model][-1].strip().endswith(form.end):  # the template has ended it
        thought = ""
    expected, texts = len(marker_tokenizer().encode(thought)), ("", form.end, f"{form.end} or {form.end}, as said.")
    for text in texts:
        assert counted(turn, marker_tokenizer().encode(f"{thought}{more}{text}"), shows) == expected
    cut = marker_tokenizer().encode(thought)[: expected - len(marker_tokenizer().encode(form.end))]
    assert counted(turn, cut, shows) == len(cut)


def test_a_begun_message_has_all_its_text_where_templates_leave_reasoning_out():
    """As those of GLM, DeepSeek and Gemma 4 do, whose text transformers would refuse to go on with."""
    for format, content in (
        ("deepseek_v3", "m.content.split('</think>')[-1]"),
        ("gemma4", "m.content.split('<|channel>')[0]"),
    ):
        cuts = template(next(model for model in MODELS if MODELS[model][0] == format)).replace(
            "m.content", f"({content})"
        )
        own, form = (
            service_of(service("Qwen3").llm, chat_template=cuts, reasoning_parser=format),
            reasoning_format(format),
        )
        for begun, is_open in ((f"{form.start}x{form.end}So", False), (f"{form.start}so", True)):
            turn, params = turn_of(own, "chat", begun, thinking_token_budget=5)
            assert own.decoded(turn.prompt).endswith(begun)
            assert params.thinking_budget.begun is is_open


def test_a_begun_answer_is_content_before_what_comes():
    """So that neither the reasoning's start nor a list that looks like calls begins the text, as in a message of its own."""
    parser = make_parser("pythonic", None, begun="The list: ")
    assert merged(parser.feed("[f()]") + parser.finish()) == [Content("[f()]")]
    parser = make_parser("pythonic", None)
    assert Content not in {type(event) for event in parser.feed("[f()]") + parser.finish()}
    parser = make_parser(None, "qwen3", prompt="<|im_start|>assistant\nSay", begun="Say")
    assert merged(parser.feed("<think>a</think>") + parser.finish()) == [Content("<think>a</think>")]


def test_every_format_of_reasoning_has_a_template():
    assert {row[0] for row in MODELS.values()} == set(REASONING_FORMATS)
