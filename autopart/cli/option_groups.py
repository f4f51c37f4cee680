"""Help of commands with many options: one section per group of options."""

from __future__ import annotations

import click

GROUPS = {
    "Model": ("model", "hf_config", "batch", "sequence", "dtype", "seed", "meta", "scaled", "weights", "lengths"),
    "Mesh and pipeline": ("devices", "mesh", "plan_path", "schedule", "microbatches", "virtual_stages"),
    "Sharding": ("sequence_parallel", "context", "sequence_dims", "balance", "pins", "zero", "prefetch"),
    "Memory and precision": ("memory", "recompute", "precision", "reduce_dtype", "compile"),
    "Training": ("optimizer", "dp_sync", "steps", "lr", "learning_rate", "max_norm", "scaler", "rng"),
}
"""{heading: names of its options}. All other options have the heading `Output and other options`."""

MIN_OPTIONS = 10
"""Number of options from which the help of a command has groups."""


class GroupedCommand(click.Command):
    """Command whose help lists its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group of options."""
        records = [(param.name, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        shown = {name: record for name, record in records if record is not None}
        if len(shown) < MIN_OPTIONS:
            super().format_options(ctx, formatter)
            return
        grouped = {name for names in GROUPS.values() for name in names}
        others = {"Output and other options": tuple(name for name in shown if name not in grouped)}
        for heading, names in (GROUPS | others).items():
            rows = [record for name, record in shown.items() if name in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class GroupedCommands(click.Group):
    """Group of commands whose help lists options in groups."""

    command_class = GroupedCommand
