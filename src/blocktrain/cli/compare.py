"""`blocktrain compare CONFIG`: train one model on the same tokens by several methods, side by side."""

from __future__ import annotations

import argparse

from blocktrain.cli.command import Command, add_configuration


def compare(options: argparse.Namespace) -> int:
    """Train by each method, then write the report and print how they compare."""
    import shlex
    from contextlib import ExitStack

    from blocktrain.cli.live import quiet_libraries
    from blocktrain.cli.session import command_line, live_line, load_config, numbered_folder
    from blocktrain.cli.show_runs import price_of_card, show_comparison
    from blocktrain.compare.compare import Search
    from blocktrain.compare.compare import compare as compare_methods
    from blocktrain.errors import ConfigError, Interrupted
    from blocktrain.integrations.trackers import Trackers
    from blocktrain.parallel.ranks import launched_rank

    quiet_libraries()
    config = load_config(options)
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods:
        raise ConfigError("--methods names none; write for example --methods full,bcd")
    try:
        factors = tuple(float(part) for part in options.lr_search.split(",") if part.strip())
    except ValueError:
        wrong = f"not '{options.lr_search}'"
        raise ConfigError(f"--lr-search must be numbers with commas, such as 0.5,1,2, {wrong}") from None
    usd_per_hour = None if options.card is None else price_of_card(options.card)
    out = options.out or numbered_folder(f"{config.name}-compare")
    try:
        with ExitStack() as stack:
            live = stack.enter_context(live_line(config, options))
            comparison = compare_methods(
                config,
                methods,
                out,
                search=Search(factors=factors, seeds=options.seeds),
                listeners=lambda folder: [live, stack.enter_context(Trackers(config, folder))],
                command=command_line(),
            )
    except Interrupted as stop:
        again = command_line() if options.out else f"{command_line()} --out {shlex.quote(str(out))}"
        raise Interrupted(f"stopped; go on with: {again}", signal_number=stop.exit_code - 128) from None
    if launched_rank() == 0:
        show_comparison(
            [folder.path for folder in comparison.folders],
            out / "report.html",
            comparison.trials,
            card=options.card,
            usd_per_hour=usd_per_hour,
            as_json=options.json,
        )
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_configuration(parser)
    parser.add_argument(
        "--methods",
        default="full,bcd",
        metavar="A,B",
        help="the methods to compare, trained in this order (default: %(default)s)",
    )
    parser.add_argument(
        "--lr-search",
        default="1",
        metavar="A,B",
        help="multiples of each method's learning rate to try (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="number of seeds at the best rate (default: %(default)s)",
    )
    parser.add_argument(
        "--card", metavar="NAME", help="price the hours on this machine as hours of this card: rtx4090, a100-80, ..."
    )


COMPARE = Command(
    name="compare",
    help="train the same model on the same tokens in full and in blocks, side by side",
    add_options=_add_options,
    run=compare,
    trains=True,
)
