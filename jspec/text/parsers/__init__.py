"""From the text of a completion to events of reasoning, content and tool calls. Nothing is imported here.

A completion goes through lexer.py, which replaces markers that are single tokens, to reader.py, from which a format reads
it as if it were there as a whole; what it finds goes to output.py.

events.py           the events
parser.py           the parser of one completion
blocks.py           the events as a row of blocks
registry.py         the formats by name, and which a chat template asks for
lexer.py            finds markers that are single tokens
reader.py           steps that wait for more text
document.py         reasoning, content and calls in turn
code_spans.py       what is code in content, where calls are examples
tool_format.py      what a format says about itself
calls.py            what a format reads from and writes to
output.py           collects events, without blanks that are markup
json_text.py        raw text of JSON values, and calls that are JSON objects
literals.py         values in notations that are nearly JSON
argument_writer.py  raw parameters as one JSON object
schema_types.py     the types of parameters by a tool's schema
call_grammar.py     grammars of calls in a format's own syntax
branches.py         the alternatives of a tool's schema, without references
raw_grammar.py      grammars of arguments that are raw text
string_grammar.py   strings of a schema as terminals of a grammar
forced.py           forms that make a model call, and calls that are JSON alone
formats/            the formats, one file for each family
"""
