"""The options of ``jspec bench serve``."""

import argparse
import pathlib

from jspec.bench.request_options import add_dataset_options, add_sampling_options

BACKENDS = ("openai", "openai-chat")


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the options."""
    parser.add_argument("--backend", choices=BACKENDS, default="openai", help="completions, or chats; %(default)s")
    parser.add_argument("--base-url", metavar="URL", help="server address, in place of --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="%(default)s")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s")
    parser.add_argument("--endpoint", metavar="PATH", help="/v1/completions, or /v1/chat/completions for openai-chat")
    parser.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="further headers of HTTP")
    parser.add_argument("--model", help="name, checkpoint folder or GGUF file; the first model that the server lists")
    parser.add_argument("--served-model-name", help="what the server calls the model; as --model")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="checkpoint folder or GGUF file, to count tokens with; as --model"
    )
    parser.add_argument("--ready-check-timeout-sec", type=float, default=0.0, help="seconds to wait for the server; 0")
    add_dataset_options(parser)
    _add_load(parser)
    add_sampling_options(parser, "the server")
    group = parser.add_argument_group("each request")
    group.add_argument("--ignore-eos", action="store_true", help="responses always have the maximum length")
    group.add_argument("--extra-body", metavar="JSON", help="further fields of the request's body")
    _add_report(parser)


def _add_load(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="requests per second; all at once")
    group.add_argument("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less comes in bursts")
    group.add_argument("--max-concurrency", type=int, help="requests under way; as many as arrive")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before the measurement; %(default)s")


def _add_report(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("report")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of a good request")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="what is reported; %(default)s")
    group.add_argument("--metric-percentiles", default="99", help="%(default)s")
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--save-detailed", action="store_true", help="the same, with an entry for each request")
    group.add_argument(
        "--result-dir", type=pathlib.Path, metavar="FOLDER", help="folder of the result; the current one"
    )
    group.add_argument("--result-filename", metavar="NAME", help="file name; made of label, rate, model and time")
    group.add_argument("--label", help="name of the run; the backend")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="further fields of the JSON")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="plot the run as .png, .svg or .pdf")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
