"""``jspec bench``: the speed of a server (``serve``), and of an engine in this process (``latency``, ``throughput``).

``serve`` imports no JAX, so it starts quickly, and it measures any server that speaks OpenAI's protocol.

command.py           the command and its three benchmarks
serve_command.py     options of ``serve``
serve_args.py        its checked options
serve.py             a run of ``serve``
load.py              sends requests at their times
arrivals.py          when requests are sent
client.py            one request, as a stream
responses.py         the text and chunk times of one response
server.py            the server's models, and whether it is ready
counters.py          the server's speculation counters
figures.py           throughput, latencies and goodput of a run
report.py            the report as text and as JSON
plot.py              the report as a plot
files.py             writes JSON files
latency.py           ``latency``: one batch in this process
throughput.py        ``throughput``: many prompts in this process
engine_options.py    options of ``latency`` and ``throughput``
request_options.py   options of the dataset and of sampling
datasets.py          prompts from files, or of random tokens
"""
