"""Sheets of a proof as its ranks write them, from arrays in memory."""

from paddle_dp.proof.trace_files import SheetWriter


def write_sheet(folder, trace, rank, shards, facts, **groups):
    """Writes a rank's sheet: shards and further groups of arrays by key."""
    with SheetWriter(folder, trace, rank) as sheet:
        for number, shard in shards.items():
            sheet.put(number, shard)
        for name, arrays in groups.items():
            sheet.group(name, arrays)
        sheet.finish(facts)
