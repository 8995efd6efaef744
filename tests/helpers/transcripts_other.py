"""Transcripts of the families whose arguments are not JSON, and of gpt-oss."""

from transcripts import table

ONE = ("call", "weather", '{"city": "Oslo"}')
NOW = ("call", "now", "{}")
TYPED = '{"city": "5", "days": 5, "exact": true, "share": 0.5, "tags": [1, "a"], "more": {"a": null}, "note": null}'
VALUES = {
    "city": "5",
    "days": "5",
    "exact": "true",
    "share": "0.5",
    "tags": '[1, "a"]',
    "more": '{"a": null}',
    "note": "null",
}


def qwen(name: str = "weather", call: str = "<tool_call>", **values) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{call}\n<function={name}>\n{parameters}</function>\n{call.replace('<', '</')}"


QWEN_ONE = qwen(city="Oslo")
QWEN3_CODER = table(
    "qwen3_coder",
    None,
    ("one", QWEN_ONE, ONE),
    ("two", f"I look.\n{QWEN_ONE}\n{qwen('now')}", ("c", "I look.\n"), ONE, NOW),
    ("typed", qwen(**VALUES), ("call", "weather", TYPED)),
    (
        "words",
        qwen(city="true", note="nul", count="07"),
        ("call", "weather", '{"city": "true", "note": "nul", "count": 7}'),
    ),
    (
        "wrong-types",
        qwen(days="many", exact="maybe", tags="[1,", more="[1]"),
        ("call", "weather", '{"days": "many", "exact": "maybe", "tags": "[1,", "more": [1]}'),
    ),
    (
        "unknown",
        qwen("f", a="1", b="x", c='{"d": 1e999}', e="NaN"),
        ("call", "f", '{"a": 1, "b": "x", "c": {"d": 1e999}, "e": "NaN"}'),
    ),
    ("escapes", qwen(city='a "b"\n\n\tc\\d </x>'), ("call", "weather", '{"city": "a \\"b\\"\\n\\n\\tc\\\\d </x>"}')),
    ("newlines", qwen(city="\n\na\n"), ("call", "weather", '{"city": "\\n\\na\\n"}')),
    (
        "python",
        qwen(tags="['a', (True, 'it\\'s')]", more="{'a': None, 'b': 1.5}", note="['a']"),
        ("call", "weather", '{"tags": ["a", [true, "it\'s"]], "more": {"a": null, "b": 1.5}, "note": "[\'a\']"}'),
    ),
    ("empty-value", qwen(city=""), ("call", "weather", '{"city": ""}')),
    (
        "repeated",
        qwen(city="a").replace("</function>", "<parameter=city>\nb\n</parameter>\n</function>"),
        ("call", "weather", '{"city": "a", "city": "b"}'),
    ),
    ("no-tool-call", f"I look.\n{qwen(city='Oslo')[12:]}\n", ("c", "I look.\n"), ONE),
    ("bare", QWEN_ONE[12:-12], ONE),
    ("no-function-end", QWEN_ONE.replace("</function>\n", ""), ONE),
    (
        "no-parameter-end",
        qwen(city="Oslo", days="2").replace("</parameter>\n", ""),
        ("call", "weather", '{"city": "Oslo", "days": 2}'),
    ),
    ("no-ends", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</tool_call>\n", ONE),
    ("name-open", "<tool_call>\n<function=now</tool_call>" + qwen("now"), NOW, NOW),
    ("next-call", f"<tool_call>\n<function=now>\n{QWEN_ONE}", NOW, ONE),
    ("next-function", "<tool_call>\n<function=now>\n<function=now>\n</function>\n</tool_call>", NOW, NOW),
    ("hermes-call", '<tool_call>\n{"name": "f"}\n</tool_call>', ("c", '<tool_call>\n{"name": "f"}\n</tool_call>')),
    ("text-in-call", f"<tool_call>\n<function=now>\nwhat?{QWEN_ONE}", ("c", "<tool_call>\n<function=now>\nwhat?"), ONE),
    ("cut-in-name", "<tool_call>\n<function=wea", ("c", "<tool_call>\n<function=wea")),
    ("cut-in-value", qwen(city="rm -r /tmp/x")[:-40], ("call", "weather", '{"city": "rm -r /tmp')),
    ("cut-in-number", "<function=weather><parameter=days>\n12", ("call", "weather", '{"days": ')),
    (
        "marker-in-value",
        qwen(city="a </paramete <parameter"),
        ("call", "weather", '{"city": "a </paramete <parameter"}'),
    ),
)
SEED = table(
    "seed_oss",
    "seed_oss",
    ("one", f"<seed:think>Hm.</seed:think>{qwen(city='Oslo', call='<seed:tool_call>')}", ("r", "Hm."), ONE),
    (
        "flat",
        "</seed:think><seed:tool_call><function=weather><parameter=city>Oslo</parameter></function></seed:tool_call>",
        ONE,
    ),
    (
        "in-thinking",
        f"Hm.\n{qwen('now', call='<seed:tool_call>')}",
        ("r", f"Hm.\n{qwen('now', call='<seed:tool_call>')}"),
    ),
)


def minimax(**values) -> str:
    parameters = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="weather">\n{parameters}</invoke>\n'


MINIMAX = table(
    "minimax_m2",
    "minimax_m2",
    (
        "two",
        f"Hm.\n</think>\n\n<minimax:tool_call>\n{minimax(city='Oslo')}{minimax(**VALUES)}</minimax:tool_call>",
        ("r", "Hm."),
        ONE,
        ("call", "weather", TYPED),
    ),
    ("empty", '</think><minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>', NOW),
    ("no-quotes", "</think><minimax:tool_call><invoke name=now></invoke></minimax:tool_call>.", NOW, ("c", ".")),
)


def dsml(around: str = "function_calls", name: str = "weather", string: str = "true", **values) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
        for key, value in values.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'
    return f"<｜DSML｜{around}>\n{call}</｜DSML｜{around}>"


DSML = table(
    "deepseek_v32",
    "deepseek_v3",
    ("one", f"I look.\n\n{dsml(city='Oslo')}", ("c", "I look.\n\n"), ONE),
    ("kept-newlines", dsml(city="\na\n"), ("call", "weather", '{"city": "\\na\\n"}')),
    (
        "json",
        dsml(string="false", days="5", city="5", x='{"a": [1]}'),
        ("call", "weather", '{"days": 5, "city": 5, "x": {"a": [1]}}'),
    ),
    (
        "python",
        dsml(string="false", x="{'a': True}", tags="('a',)"),
        ("call", "weather", '{"x": {"a": true}, "tags": ["a"]}'),
    ),
    ("string", dsml(string="true", x="5", days="5"), ("call", "weather", '{"x": "5", "days": 5}')),
    ("v4", dsml("tool_calls", "now"), NOW),
    ("v4-other", dsml("toolcalls", "now") + dsml("tool", "now"), NOW, NOW),
)


def glm(name: str = "weather", newline: str = "\n", **values) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}" for key, value in values.items()
    )
    return f"<tool_call>{name}{newline}{pairs}</tool_call>"


GLM = table(
    "glm45",
    "glm45",
    ("one", f"\n<think>Hm.</think>\nI look.\n{glm(city='Oslo')}", ("r", "Hm."), ("c", "I look.\n"), ONE),
    ("flat", f"</think>{glm(newline='', city='Oslo')}{glm(newline='', **VALUES)}", ONE, ("call", "weather", TYPED)),
    ("empty", "</think><tool_call>now</tool_call>", NOW),
    ("empty-first", f"</think>{glm('now', '')}{glm('now')}\n{glm(city='Oslo')}", NOW, NOW, ONE),
    ("in-thinking", f"<think>Hm.{glm('now')}", ("r", f"Hm.{glm('now')}")),
    (
        "mention",
        f"</think>Use <tool_call> and <tool_call>or {glm('now')}",
        ("c", "Use <tool_call> and <tool_call>or "),
        NOW,
    ),
    ("off", "Hi.", ("c", "Hi."), {"prompt": "<|user|>\nx/nothink<|assistant|>\n<think></think>"}),
    ("on", "Hm.</think>Hi.", ("r", "Hm."), ("c", "Hi."), {"prompt": "<|user|>\nx<|assistant|><think>"}),
    ("no-value-end", "</think><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</tool_call>", ONE),
    ("json", '</think><tool_call>\n{"name": "f"}\n</tool_call>', ("c", '<tool_call>\n{"name": "f"}\n</tool_call>')),
    ("cut", f"</think>{glm(city='Oslo')}"[:-26], ("call", "weather", '{"city": "Osl')),
)
Q = '<|"|>'
GEMMA = table(
    "gemma4",
    "gemma4",
    ("one", f"<|tool_call>call:weather{{city:{Q}Oslo{Q}}}<tool_call|>", ONE),
    (
        "nested",
        f"<|tool_call>call:f{{a:{Q}x, {{y}}{Q},n:4,o:{{k:[1,true,{{z:1.5}}],m:{Q}{Q}}},l:[],b:false,e:None}}<tool_call|>",
        (
            "call",
            "f",
            '{"a": "x, {y}", "n": 4, "o": {"k": [1, true, {"z": 1.5}], "m": ""}, "l": [], "b": false, "e": null}',
        ),
    ),
    ("two", "I look.<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>", ("c", "I look."), NOW, NOW),
    ("thinking", "<|channel>thought\nHm.\n<channel|>Hi.", ("r", "Hm."), ("c", "Hi.")),
    ("in-thinking", "<|channel>thought\nHm.<|tool_call>call:now{}", ("r", "Hm.<|tool_call>call:now{}")),
    (
        "other-quotes",
        """<|tool_call>call:f{"a":'it\\'s, }',b: "x\\u00e9\\n",'c d':["e",{'f':"5"}],g:''}<tool_call|>""",
        ("call", "f", '{"a": "it\'s, }", "b": "xé\\n", "c d": ["e", {"f": "5"}], "g": ""}'),
    ),
    (
        "words",
        "<|tool_call>call:f{a:True,b:[None,False,{'c':True}]}<tool_call|>",
        ("call", "f", '{"a": true, "b": [null, false, {"c": true}]}'),
    ),
    ("off", "Hi.", ("c", "Hi."), {"prompt": "<|turn>model\n<|channel>thought\n<channel|>"}),
    (
        "typed",
        f"<|tool_call>call:weather{{days:{Q}5{Q},city:12,x:what is it}}<tool_call|>",
        ("call", "weather", '{"days": 5, "city": "12", "x": "what is it"}'),
    ),
    ("quotes", f'<|tool_call>call:f{{{Q}k{Q}:{Q}a"b\n{Q}}}<tool_call|>', ("call", "f", '{"k": "a\\"b\\n"}')),
    ("no-call", "<|tool_call>x", ("c", "<|tool_call>x")),
    ("deep", "<|tool_call>call:f{a:" + 80 * "[", ("call", "f", '{"a": ' + 64 * "["), ("c", 16 * "[")),
    ("cut", f"<|tool_call>call:f{{a:{Q}x", ("call", "f", '{"a": "x')),
)
PYTHONIC = table(
    "pythonic",
    None,
    ("two", '[weather(city="Oslo"), now()]', ONE, NOW),
    (
        "values",
        "[weather(days=5, x=[1, 'a', None, (True, -2.5)], more={'k': {}, 2: false}, note=null,)]",
        (
            "call",
            "weather",
            '{"days": 5, "x": [1, "a", null, [true, -2.5]], "more": {"k": {}, "2": false}, "note": null}',
        ),
    ),
    (
        "strings",
        "[weather(city='a\"\\'\\n\\x41\\u20ac\\101\\z')]",
        ("call", "weather", '{"city": "a\\"\'\\nA€A\\\\z"}'),
    ),
    ("long-strings", "[weather(city='''a'b\n''', note=\"\")]", ("call", "weather", '{"city": "a\'b\\n", "note": ""}')),
    ("pairs", "[weather(city='\\ud83d\\ude00\\ud83d')]", ("call", "weather", '{"city": "😀�"}')),
    (
        "numbers",
        "[now(a=1_000, b=0x10, c=.5, d=1e999, e=007)]",
        ("call", "now", '{"a": 1000, "b": 16, "c": 0.5, "d": 1e999, "e": 7.0}'),
    ),
    ("typed", "[weather(city=5, days='5')]", ("call", "weather", '{"city": "5", "days": 5}')),
    ("llama4", '<|python_start|>[weather(city="Oslo")]<|python_end|>', ONE),
    ("olmo", '<function_calls>\nweather(city="Oslo")\nnow()\n</function_calls>', ONE, NOW),
    ("text", "[1] is a list", ("c", "[1] is a list")),
    ("code", 'a = [weather(city="Oslo")]', ("c", 'a = [weather(city="Oslo")]')),
    ("no-tool", "[print(a=1)]", ("c", "[print(a=1)]")),
    ("positional", "[weather('Oslo')]", ("c", "[weather('Oslo')]")),
    ("expression", "[weather(city=f(1))]", ("call", "weather", '{"city": "f"'), ("c", "(1))]")),
    ("cut", "[weather(city='Os", ("call", "weather", '{"city": "Os')),
)
# Of two formats, of which a marker begins with a marker of the other.
MIXED = table(
    "pythonic",
    "mistral",
    ("brackets", "[THINK]Hm.[/THINK][now()]", ("r", "Hm."), NOW),
    ("half-bracket", "[THINK]Hm.[/THINK]Hi.[[THIN", ("r", "Hm."), ("c", "Hi.[[THIN")),
)
A, F = "<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant<|channel|>final<|message|>Hi."
ARGUMENTS = '<|message|>{"city": "Oslo"}<|call|>'
START = {"prompt": "<|start|>user<|message|>x<|end|><|start|>assistant"}
HARMONY = table(
    "openai",
    "openai_gptoss",
    ("final", f"{A}{F}<|return|>", ("r", "Hm."), ("c", "Hi.")),
    ("final-no-end", f"{A}{F}", ("r", "Hm."), ("c", "Hi.")),
    (
        "call",
        f"{A}<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json{ARGUMENTS}",
        ("r", "Hm."),
        ONE,
    ),
    ("stop", f"<|channel|>commentary to=functions.weather <|constrain|>json{ARGUMENTS[:-8]}", ONE),
    (
        "recipient-first",
        f"{A}<|start|>assistant to=functions.weather<|channel|>commentary json{ARGUMENTS}",
        ("r", "Hm."),
        ONE,
    ),
    ("recipient-in-prompt-turn", f" to=functions.weather<|channel|>commentary{ARGUMENTS}", ONE),
    ("stray-json", f"<|channel|>commentary to=functions.weather json{ARGUMENTS}", ONE),
    ("json-in-text", '<|channel|>commentary to=functions.weather<|message|>json{"city": "Oslo"}<|call|>', ONE),
    (
        "no-channel",
        f"analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather{ARGUMENTS}",
        ("r", "Hm."),
        ONE,
    ),
    ("no-channel-call", f"commentary to=functions.weather <|constrain|>json{ARGUMENTS}", ONE),
    ("on-analysis", f"<|channel|>analysis to=functions.weather code{ARGUMENTS}", ONE),
    ("on-final", f"<|channel|>final to=functions.weather{ARGUMENTS}", ONE),
    (
        "two",
        f"<|channel|>commentary to=functions.weather{ARGUMENTS}"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        ONE,
        NOW,
    ),
    ("empty", "<|channel|>commentary to=functions.now<|message|><|call|>", NOW),
    (
        "preamble",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary"
        + ARGUMENTS,
        ("c", "I look."),
        ONE,
    ),
    ("no-end", f"<|channel|>analysis<|message|>Hm.{F}", ("r", "Hm."), ("c", "Hi.")),
    ("no-end-no-start", "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.", ("r", "Hm."), ("c", "Hi.")),
    ("no-header", "Hello there.<|return|>", ("c", "Hello there.")),
    ("no-header-later", f"{A}Hello there.", ("r", "Hm."), ("c", "Hello there.")),
    ("unknown-channel", "<|channel|>critic<|message|>Hi.", ("c", "Hi.")),
    ("to-assistant", "<|channel|>commentary to=assistant<|message|>Hi.", ("c", "Hi.")),
    (
        "other-tool",
        f"{A}<|start|>assistant<|channel|>commentary to=browser.open <|constrain|>json{ARGUMENTS}",
        ("r", "Hm."),
        ("c", f"<|start|>assistant<|channel|>commentary to=browser.open <|constrain|>json{ARGUMENTS}"),
    ),
    (
        "no-object",
        "<|channel|>final to=functions.f<|message|>x<|end|>",
        ("c", "<|channel|>final to=functions.f<|message|>x<|end|>"),
    ),
    ("bad-name", "<|channel|>commentary to=<|message|>Hi.", ("c", "Hi.")),
    (
        "opened-message",
        "m.<|end|>" + F,
        ("r", "m."),
        ("c", "Hi."),
        {"prompt": "<|start|>assistant<|channel|>analysis<|message|>H"},
    ),
    ("cut-thinking", "<|channel|>analysis<|message|>Hm.\n", ("r", "Hm.\n")),
    ("cut-header", f"{A}<|start|>assistant<|chan", ("r", "Hm."), ("c", "<|start|>assistant<|chan")),
    ("cut-header-word", f"{A}<|start|>assistant<|channel|>fin", ("r", "Hm.")),
    ("cut-call", '<|channel|>commentary to=functions.f<|message|>{"a": ', ("call", "f", '{"a": ')),
    **START,
)
TRANSCRIPTS = [*QWEN3_CODER, *SEED, *MINIMAX, *DSML, *GLM, *GEMMA, *PYTHONIC, *MIXED, *HARMONY]
