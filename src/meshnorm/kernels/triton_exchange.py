"""Device code of the exchange: programs that share a row each contribute one float32, and all get the sum.

A slot is 64 bits, {tag: 32, value: 32}: one store publishes the value and that it is there, and needs no fence. A
reader polls until every contributor's slot carries the tag of the row, and adds the values in the contributors' order,
so that all get the same bits.

Slots lie in a ring of RING rows for each group of programs. A program posts row i and then waits for row i - LOOKAHEAD.
Seeing a peer's post of row j it knows that the peer is done waiting for row j - LOOKAHEAD - 1; so a ring of
2 * LOOKAHEAD + 2 rows is never overwritten before all have read it.

Tags go on where the launch before left off: STATE[0] is the next free tag, which the last program to finish advances.
So a captured CUDA graph can be replayed. Where the count wraps around, that program clears the slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def post(slot, value, tag, mask):
    """Publishes ``value`` under ``tag``."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(slot, bits | (tag.to(tl.int64) << 32), mask=mask)


@triton.jit
def wait_for_sum(slots, tag, mask):
    """The sum of the values in ``slots``, a vector, where ``mask``, once all of them carry ``tag``.

    A vector, since a thread then polls one slot: of a matrix it has several, and waits for one after the other (24 µs a
    row instead of 2 with 32 of them, H200).

    One opaque operation: around a ``while`` of volatile loads Triton does not pipeline the loop (70-74% of copy
    bandwidth instead of 84-85%, prototype on an H200). After 2²⁶ polls, some ten seconds and more, it traps: all
    programs are resident, so this is a fault and not a delay, and a launch failure is better than a hang.

    Asking for the slots ahead of the row's loads, to hide the answer's way from L2, gained nothing (82% either way).
    """
    address = tl.where(mask, slots.to(tl.int64, bitcast=True), 0)
    bits = tl.inline_asm_elementwise(
        """
        {
        .reg .pred ready, absent, again;
        .reg .b64 slot;
        .reg .b32 tag, value, polls;
        mov.b32 $0, 0;
        setp.eq.b64 absent, $1, 0;
        @absent bra DONE;
        mov.b32 polls, 0;
        POLL:
        ld.relaxed.gpu.global.b64 slot, [$1];
        mov.b64 {value, tag}, slot;
        setp.eq.b32 ready, tag, $2;
        @ready bra READY;
        add.u32 polls, polls, 1;
        setp.lt.u32 again, polls, 67108864;
        @again bra POLL;
        trap;
        READY:
        mov.b32 $0, value;
        DONE:
        }
        """,
        constraints="=&r,l,r",
        args=[address, tag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.sum(bits.to(tl.float32, bitcast=True), axis=0)


@triton.jit
def advance(STATE, SLOTS, capacity, base, span, BLOCK: tl.constexpr):
    """Called by each program when it is done: the last one moves the first free tag on by ``span``."""
    tl.debug_barrier()  # no warp of this program still polls
    finished = tl.atomic_add(STATE + 1, 1)
    if finished == tl.num_programs(0) - 1:
        tl.store(STATE + 1, 0)
        after = base + span
        if after < base:  # wrapped around: old tags would come up again
            for start in range(0, capacity, BLOCK):
                index = start + tl.arange(0, BLOCK)
                tl.store(SLOTS + index, tl.zeros([BLOCK], tl.int64), mask=index < capacity)
            after = base * 0 + 1
        tl.store(STATE, after)
