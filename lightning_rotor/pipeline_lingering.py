r"""How long a device holds on to what it has sent, or made for everybody, under the schedules of :mod:`torch.distributed.pipelining`.

A send gives its memory back when nobody refers to its work any longer, which is when torch's loop drops it, not when the message has arrived::

    gpipe, interleaved   all sends are waited for behind the last action: everything that was sent stays until then

    1f1b, stage s of S   W = min(m, S - s) forwards come first, and the name ``send_work`` stands for one send at a time:
                         the output of micro-batch W - 2 from then on, until the last forward has been followed by its backward;
                         then, with only backwards left, each gradient while the backward behind it runs

        F0 F1 F2 B0 F3 B1 F4 B2 B3 B4      S - s = 3
           └────────────────┘              output of 1: held by the micro-batch itself up to B1, and beyond it up to B2
                          └──┘             gradient of 2
                             └──┘          gradient of 3

From torch 2.15 on, an output goes once it has been sent, at the latest with its micro-batch; of gradients the same is true as before.

Besides, every process is given all outputs and the gradients of all inputs behind the step, so the last stage keeps the former and the first
one the latter, whatever the schedule.

Read from torch 2.14.1 and 2.15.0 and measured with gloo; NCCL lets go of what GPipe has sent forward when the backwards begin, which is sooner.
"""

from __future__ import annotations

from lightning_rotor.pipeline_schedule import Actions, PipelineScheduleName


def lingering(schedule: PipelineScheduleName, order: Actions, *, stages: int, outputs_linger: bool) -> tuple[int, ...]:
    """By action of a device, the place of the last action while which what it made is still there; its own place if it goes at once.

    Args:
        schedule: Which of torch's loops runs the actions.
        order: Of one device.
        stages: How many pipeline stages there are on all devices.
        outputs_linger: Torch holds on to outputs whose sending is done, see :func:`lightning_rotor.private.pipelining.sent_outputs_linger`.
    """
    end = len(order) - 1
    until = list(range(len(order)))
    works = [action.work for action in order]
    if schedule == "1f1b":
        ahead = works.index("backward")
        first_left = len(order) - 1 - works[::-1].index("forward") + 1  # the backward behind the last forward
        if ahead > 1 and outputs_linger:
            until[ahead - 2] = first_left
        for place in range(first_left, end):
            until[place] = place + 1
    for place, action in enumerate(order):
        lingers = schedule != "1f1b" and (outputs_linger or action.work == "backward")
        if lingers or (action.stage, action.work) in ((stages - 1, "forward"), (0, "backward")):
            until[place] = end
    return tuple(until)
