"""Transcripts of the families whose arguments are JSON."""

from transcripts import Transcript, table

OFF = {"prompt": "<|im_start|>assistant\n<think>\n\n</think>\n\n"}
ONE = ("call", "weather", '{"city": "Oslo"}')
HERMES_ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

HERMES = table(
    "hermes",
    None,
    ("plain", "Hello, world.\n", ("c", "Hello, world.\n")),
    ("blank", " \n", ("c", " \n")),
    ("one", HERMES_ONE, ONE),
    ("content-before", f"Let me look.\n\n{HERMES_ONE}", ("c", "Let me look.\n\n"), ONE),
    ("two", f"{HERMES_ONE}\n{HERMES_ONE}\n", ONE, ONE),
    ("content-after", f"{HERMES_ONE}\n\nDone.", ONE, ("c", "\n\nDone.")),
    (
        "two-in-one",
        '<tool_call>[{"name":"now","arguments":{}},\n{"name":"now","arguments":{}}]</tool_call>',
        ("call", "now", "{}"),
        ("call", "now", "{}"),
    ),
    ("no-arguments", '<tool_call>{"name": "now"}</tool_call>', ("call", "now", "{}")),
    ("null-arguments", '<tool_call>{"name": "now", "arguments": null}</tool_call>', ("call", "now", "{}")),
    (
        "arguments-first",
        '<tool_call>{"arguments": {"a": [1.50, {"b": []}]}, "id": 3, "name": "f"}</tool_call>',
        ("call", "f", '{"a": [1.50, {"b": []}]}'),
    ),
    ("parameters", '<tool_call>{"name":"f","parameters":{"x":-1}}</tool_call>', ("call", "f", '{"x":-1}')),
    (
        "as-written",
        '<tool_call>{"name": "f", "arguments": {"x" :1e2 , "é": "\\u00e9\\"}"}}</tool_call>',
        ("call", "f", '{"x" :1e2 , "é": "\\u00e9\\"}"}'),
    ),
    (
        "objects-in-list",
        '<tool_call>{"name": "f", "arguments": {"l": [{"a": 1}, {"a": 2}]}}</tool_call>',
        ("call", "f", '{"l": [{"a": 1}, {"a": 2}]}'),
    ),
    (
        "marker-in-string",
        '<tool_call>{"name": "f", "arguments": {"t": "</tool_call> <tool_call>"}}</tool_call>',
        ("call", "f", '{"t": "</tool_call> <tool_call>"}'),
    ),
    ("text-arguments", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("call", "f", '{"a": 1}')),
    ("brace-too-many", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ("call", "f", '{"a": 1}')),
    (
        "brace-too-few",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>.',
        ("call", "f", '{"a": 1}'),
        ("c", "."),
    ),
    ("no-end", '<tool_call>{"name": "f", "arguments": {"a": 1}}', ("call", "f", '{"a": 1}')),
    ("no-json", "<tool_call>weather Oslo</tool_call>", ("c", "<tool_call>weather Oslo</tool_call>")),
    ("no-name", '<tool_call>{"arguments": {}}</tool_call>', ("c", '<tool_call>{"arguments": {}}</tool_call>')),
    ("half-marker", "a <tool_cal", ("c", "a <tool_cal")),
    ("stray-end", "a </tool_call> b", ("c", "a </tool_call> b")),
    ("again", f"<tool_call>x{HERMES_ONE}", ("c", "<tool_call>x"), ONE),
    ("think-is-text", "<think>hm</think>a", ("c", "<think>hm</think>a")),
    ("cut-in-name", '<tool_call>\n{"name": "wea', ("c", '<tool_call>\n{"name": "wea')),
    ("cut-in-arguments", '<tool_call>\n{"name": "f", "arguments": {"a": "b', ("call", "f", '{"a": "b')),
    ("cut-before-arguments", '<tool_call>\n{"name": "f", ', ("c", '<tool_call>\n{"name": "f", ')),
    ("cut-in-text", '<tool_call>\n{"name": "f", "arguments": "{\\"a', ("call", "f", '"{\\"a')),
    ("empty-text", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', ("call", "now", "{}")),
    (
        "list",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ("c", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ),
    ("mention", f"Write <tool_call> and <tool_call>\n{HERMES_ONE}", ("c", "Write <tool_call> and <tool_call>\n"), ONE),
    ("stray-backtick", f"Run `ls now.\n{HERMES_ONE}", ("c", "Run `ls now.\n"), ONE),
    (
        "code-before",
        f"`a` and ``b`c``\n```py\n~~~\nx = '`'\n```\n{HERMES_ONE}",
        ("c", "`a` and ``b`c``\n```py\n~~~\nx = '`'\n```\n"),
        ONE,
    ),
    ("open-fence", f"```\na\n  ```py\n{HERMES_ONE}\n````\n", ("c", f"```\na\n  ```py\n{HERMES_ONE}\n````\n")),
    (
        "fence-in-list",
        f"1. ```xml\n{HERMES_ONE}\n   ```\n{HERMES_ONE}",
        ("c", f"1. ```xml\n{HERMES_ONE}\n   ```\n"),
        ONE,
    ),
)
QWEN3 = table(
    "hermes",
    "qwen3",
    ("thinking", f"<think>\nHm,\n\nso.\n</think>\n\n{HERMES_ONE}", ("r", "Hm,\n\nso."), ONE),
    ("thinking-content", "<think>\nHm.\n</think>\n\nHello.\n", ("r", "Hm."), ("c", "Hello.\n")),
    ("opened", "Hm.\n</think>\n\nHi.", ("r", "Hm."), ("c", "Hi."), {"prompt": "<|im_start|>assistant\n<think>\n"}),
    ("opened-newline", "\nHm.</think>Hi.", ("r", "Hm."), ("c", "Hi."), {"prompt": "<|im_start|>assistant\n<think>"}),
    ("off", "Hello.", ("c", "Hello."), OFF),
    ("off-call", HERMES_ONE, ONE, OFF),
    ("off-thinks", "<think>\nHm.\n</think>\nHi.", ("r", "Hm."), ("c", "Hi."), OFF),
    ("off-end", "a</think>b", ("c", "a</think>b"), OFF),
    (
        "user-wrote-end",
        "Hm.</think>Hi.",
        ("r", "Hm."),
        ("c", "Hi."),
        {"prompt": "<|im_start|>user\nWhat is </think>?<|im_end|>\n<|im_start|>assistant\n"},
    ),
    ("missing-start", "Hm.\n</think>\nHi.", ("r", "Hm."), ("c", "Hi.")),
    ("empty", "<think>\n\n</think>\n\nHi.", ("c", "Hi.")),
    ("call-in-thinking", f"<think>\nHm.\n{HERMES_ONE}\n</think>Hi.", ("r", f"Hm.\n{HERMES_ONE}"), ("c", "Hi.")),
    ("call-before-thinking", f"\n{HERMES_ONE}<think>Hm.</think>Hi.", ONE, ("r", "Hm."), ("c", "Hi.")),
    ("no-call-before-thinking", "<tool_call>?</think>Hi.", ("r", "<tool_call>?"), ("c", "Hi.")),
    (
        "opened-call",
        f"{HERMES_ONE}</think>Hi.",
        ("r", HERMES_ONE),
        ("c", "Hi."),
        {"prompt": "<|im_start|>assistant\n<think>"},
    ),
    ("no-call-in-thinking", "<think>\nA <tool_call> is\n</think>\nHi.", ("r", "A <tool_call> is"), ("c", "Hi.")),
    ("cut-thinking", "<think>\nHm.\n\n", ("r", "Hm.\n\n")),
    ("start-in-thinking", "<think>a<think>b</think>c", ("r", "a<think>b"), ("c", "c")),
    ("start-in-content", "</think>a <think>b</think>", ("c", "a <think>b</think>")),
    ("thinks-again", f"a</think>{HERMES_ONE}<think>b</think>c", ("r", "a"), ONE, ("r", "b"), ("c", "c")),
    ("end-in-content", "</think>a</think>", ("c", "a</think>")),
)
REASONING_ALONE = [
    Transcript("r1", None, "deepseek_r1", "Hm.\n</think>\n\nHi.", (("r", "Hm."), ("c", "Hi."))),
    Transcript("calls-are-text", None, "qwen3", f"a</think>{HERMES_ONE}", (("r", "a"), ("c", HERMES_ONE))),
    Transcript("v3-off", None, "deepseek_v3", "Hi.", (("c", "Hi."),), "<｜User｜>x<｜Assistant｜></think>"),
    Transcript(
        "v3-on", None, "deepseek_v3", "a</think>b", (("r", "a"), ("c", "b")), "<｜User｜>x<｜Assistant｜><think>"
    ),
    Transcript("v3-unknown", None, "deepseek_v3", "a", (("c", "a"),)),
    Transcript("none", None, None, f"<think>{HERMES_ONE}", (("c", f"<think>{HERMES_ONE}"),)),
]
V31 = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
OPEN, CALL, SEP, END, CLOSE = V31
FENCED = f'{CALL}function{SEP}weather\n```json\n{{"city": "Oslo"}}\n```{END}'
BARE = f'{CALL}weather{SEP}{{"city": "Oslo"}}{END}'
DEEPSEEK = [
    *table(
        "deepseek_v3",
        "deepseek_r1",
        ("two", f"Hm.\n</think>\n\nI look.{OPEN}{FENCED}\n{FENCED}{CLOSE}", ("r", "Hm."), ("c", "I look."), ONE, ONE),
        ("in-thinking", f"Hm.\n{OPEN}{FENCED}{CLOSE}", ("r", f"Hm.\n{OPEN}{FENCED}{CLOSE}")),
        ("no-section", f"</think>{FENCED}", ONE),
        ("empty", f"</think>{OPEN}{CALL}function{SEP}now\n```json\n```{END}{CLOSE}", ("call", "now", "{}")),
        ("no-fence", f"</think>{OPEN}{CALL}function{SEP}now\n{{}}{END}{CLOSE}", ("call", "now", "{}")),
        (
            "fence-in-text",
            f'</think>{OPEN}{CALL}function{SEP}f\n```json\n{{"a": "```"}}\n```{END}{CLOSE}',
            ("call", "f", '{"a": "```"}'),
        ),
    ),
    *table(
        "deepseek_v31",
        "deepseek_v3",
        ("two", f"I look.{OPEN}{BARE}{BARE}{CLOSE}", ("c", "I look."), ONE, ONE),
        ("empty", f"{OPEN}{CALL}now{SEP}{END}{CLOSE}", ("call", "now", "{}")),
        ("text", f"{OPEN}weather", ("c", f"{OPEN}weather")),
        ("no-end", f'{OPEN}{CALL}f{SEP}{{"a": 1}}', ("call", "f", '{"a": 1}')),
        ("brace-too-few", f'{OPEN}{CALL}f{SEP}{{"a": {{"b": 1}}{END}{CLOSE}', ("call", "f", '{"a": {"b": 1}')),
    ),
]
KOPEN, KCLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(header: str, arguments: str = '{"city": "Oslo"}') -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI = table(
    "kimi_k2",
    "kimi_k2",
    (
        "two",
        f"Hm.</think>I look.{KOPEN}{kimi('functions.weather:0')}{kimi('functions.now:1', '{}')}{KCLOSE}",
        ("r", "Hm."),
        ("c", "I look."),
        (*ONE, "functions.weather:0"),
        ("call", "now", "{}", "functions.now:1"),
    ),
    ("in-thinking", f"Hm.{KOPEN}{kimi('functions.now:3')}</think>", ("r", f"Hm.{KOPEN}{kimi('functions.now:3')}")),
    (
        "singular",
        f"</think><|tool_call_section_begin|>{kimi('functions.weather:0')}<|tool_call_section_end|>",
        (*ONE, "functions.weather:0"),
    ),
    ("other-id", f"</think>{KOPEN}{kimi('weather')}{KCLOSE}", ONE),
    ("no-prefix", f"</think>{KOPEN}{kimi('weather:2')}{KCLOSE}", (*ONE, "weather:2")),
    ("dotted", f"</think>{KOPEN}{kimi('functions.a.b:2', '')}{KCLOSE}", ("call", "a.b", "{}", "functions.a.b:2")),
    ("no-section", f"</think>a{kimi('functions.weather:0')}", ("c", "a"), (*ONE, "functions.weather:0")),
    ("blanks", f"</think>{KOPEN}\n{kimi(' functions.weather:0 ')}\n{KCLOSE}\n", (*ONE, "functions.weather:0")),
    ("no-name", f"</think>{KOPEN}x", ("c", f"{KOPEN}x")),
)
LLAMA_ONE = '{"name": "weather", "parameters": {"city": "Oslo"}}'
LLAMA = table(
    "llama3_json",
    None,
    ("one", LLAMA_ONE, ONE),
    ("tag", f"<|python_tag|>{LLAMA_ONE}", ONE),
    ("two", f"{LLAMA_ONE}; {LLAMA_ONE}", ONE, ONE),
    ("type", f'{{"type": "function", {LLAMA_ONE[1:]}', ONE),
    ("arguments", '{"name": "weather", "arguments": {"city": "Oslo"}}', ONE),
    ("text-around", f"I call\n{LLAMA_ONE}\nnow", ("c", "I call\n"), ONE, ("c", "\nnow")),
    ("other-json", '{"person": {"name": "now"}}', ("c", '{"person": {"name": "now"}}')),
    ("other-name", '{"name": "Bob", "parameters": {}}', ("c", '{"name": "Bob", "parameters": {}}')),
    ("code", "int main() { return 0; }", ("c", "int main() { return 0; }")),
    ("python", '<|python_tag|>print("x")', ("c", '<|python_tag|>print("x")')),
    ("no-arguments", '{"name": "now"}', ("c", '{"name": "now"}')),
    ("unknown-tools", '{"name": "f", "parameters": {}}', ("call", "f", "{}"), {"tools": None}),
    ("unknown-tools-text", '{"name": "f", "age": 3}', ("c", '{"name": "f", "age": 3}'), {"tools": None}),
    ("cut", LLAMA_ONE[:-6], ("call", "weather", '{"city": "O')),
)
MISTRAL = table(
    "mistral",
    "mistral",
    (
        "old",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
        ONE,
        ("call", "now", "{}"),
    ),
    (
        "old-integers",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 12, "m": -3.0}}]',
        ("call", "f", '{"n": 12, "m": -3.0}'),
    ),
    ("new", 'I look.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', ("c", "I look."), ONE),
    ("new-two", '[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}', ONE, ("call", "now", "{}")),
    ("id", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', (*ONE, "abcdefghi")),
    ("thinking", "[THINK]Hm.\n[/THINK]Hi.[TOOL_CALLS]now[ARGS]{}", ("r", "Hm."), ("c", "Hi."), ("call", "now", "{}")),
    ("in-thinking", "[THINK]Hm.[TOOL_CALLS]now[ARGS]{}[/THINK]", ("r", "Hm.[TOOL_CALLS]now[ARGS]{}")),
    ("empty", "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now{}", ("call", "now", "{}"), ("call", "now", "{}")),
    ("marker-in-string", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', ("call", "f", '{"a": "[TOOL_CALLS]"}')),
    ("brackets", "a[1] = [TOOL_", ("c", "a[1] = [TOOL_")),
    ("no-call", "[TOOL_CALLS]", ("c", "[TOOL_CALLS]")),
    ("cut", '[TOOL_CALLS]f{"a": [1, ', ("call", "f", '{"a": [1, ')),
)
FENCE_ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
JSON_FENCE = table(
    "json_fence",
    None,
    ("fence", f"I look.\n```json\n{FENCE_ONE}\n```\nDone.", ("c", "I look.\n"), ONE, ("c", "\nDone.")),
    ("no-language", f"```\n{FENCE_ONE}\n```", ONE),
    ("two", f"```json\n{FENCE_ONE}\n{FENCE_ONE}\n```\n```json\n{FENCE_ONE}\n```", ONE, ONE, ONE),
    ("bare", f"{FENCE_ONE}\n{FENCE_ONE}", ONE, ONE),
    ("flat", f"```json{FENCE_ONE}```", ONE),
    ("in-line", f"Write {FENCE_ONE}", ("c", f"Write {FENCE_ONE}")),
    ("other-fence", f"```js\n{FENCE_ONE}\n```\n", ("c", f"```js\n{FENCE_ONE}\n```\n")),
    ("other-json", '```json\n{"city": "Oslo"}\n```\n' + FENCE_ONE, ("c", '```json\n{"city": "Oslo"}\n```\n'), ONE),
    ("other-name", '```\n{"name": "Bob", "arguments": {}}\n```', ("c", '```\n{"name": "Bob", "arguments": {}}\n```')),
    ("no-arguments", '{"name": "now"}', ("c", '{"name": "now"}')),
    ("open", f"```json\n{FENCE_ONE}", ONE),
    ("cut", f"```json\n{FENCE_ONE[:-6]}", ("call", "weather", '{"city": "O')),
)
TRANSCRIPTS = [*HERMES, *QWEN3, *REASONING_ALONE, *DEEPSEEK, *KIMI, *LLAMA, *MISTRAL, *JSON_FENCE]
