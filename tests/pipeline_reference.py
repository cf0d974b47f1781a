"""A step of a pipeline action by action, as slow and as plain as can be: the oracle of the simulator."""

from __future__ import annotations

from lightning_rotor.pipeline.pipeline_schedule import actions


def load_of(stage, micro_batch, micro_batches):
    return stage.last if stage.last is not None and micro_batch == micro_batches - 1 else stage.micro_batch


def slow_step_seconds(order, loads, micro_batches):
    """A device goes on until it lacks something that another one has not sent yet; whoever sends it wakes it up."""
    order = [actions(device) for device in order]
    home = {action.stage: number for number, device in enumerate(order) for action in device}
    arrived, link_free = {}, {}
    ends = [[] for _ in order]
    awake = list(range(len(order)))[::-1]
    while awake:
        device = awake.pop()
        own, done = order[device], ends[device]
        while len(done) < len(own):
            stage, work, number = own[len(done)]
            forward = work == "forward"
            needs_nothing = stage == 0 if forward else stage == len(loads) - 1
            ready = 0.0 if needs_nothing else arrived.pop((stage, work, number), -1.0)
            if ready < 0:
                break
            load = load_of(loads[stage], number, micro_batches)
            end = max(ready, done[-1] if done else 0.0) + (load.forward_seconds if forward else load.backward_seconds)
            done.append(end)
            target = stage + 1 if forward else stage - 1
            if not 0 <= target < len(loads):
                continue
            peer = home[target]
            if peer != device:
                travel = loads[stage].send_forward_seconds if forward else loads[stage].send_backward_seconds
                end = max(end, link_free.get((device, peer), 0.0)) + travel
                link_free[device, peer] = end
                awake.append(peer)
            arrived[target, work, number] = end
    return max(device[-1] for device in ends)


def slow_levels(order, loads, micro_batches, lingering=None):
    """By action of a device, most that it holds meanwhile, and what it holds then."""
    order = actions(order)
    stages = {action.stage for action in order}
    live = sum(loads[stage].static_bytes for stage in stages)
    with_gradients = set()
    until = range(len(order)) if lingering is None else lingering
    leaves = [0] * len(order)
    outputs_until, levels = {}, []
    for place, action in enumerate(order):
        stage = loads[action.stage]
        load = load_of(stage, action.micro_batch, micro_batches)
        if action.work == "forward":
            peak = live + load.forward_peak_bytes
            live += load.held_bytes
            outputs_until[action.stage, action.micro_batch] = until[place]
        else:
            live -= load.held_bytes
            if action.stage in with_gradients:
                peak = live + load.backward_peak_bytes
            else:
                peak = live + load.first_backward_peak_bytes
                live += stage.gradient_bytes
                with_gradients.add(action.stage)
            for last, size in (
                (outputs_until[action.stage, action.micro_batch], stage.output_bytes),
                (until[place], stage.input_gradient_bytes),
            ):
                if last > place:
                    live += size
                    leaves[last] += size
        after = live - leaves[place]
        levels.append((max(peak, after), after))
        live = after
    return levels
