r"""What an optimizer will hold and allocate, before its first step.

From step 2 on, optimizer state is alive while the forward runs, so a plan that is made at step 1 must know its size. A clone of the
optimizer takes a dry step on tensors without memory::

    optimizer ──deep copy──► clone ──step()──► state on "meta" ──► bytes on the devices of the parameters
    parameters ─────────────► "meta" tensors with "meta" gradients
    scalars on the CPU ─────► copies (Adam reads its step counter)

The user's optimizer, its hooks, its schedulers and all random number generators stay as they are. How sure the number is depends on how
it was obtained, from the best way to the worst:

1. A dry step on ``meta`` works. Values that the step reads there come back as 1. The optimizers of ``torch.optim`` create the same
   state whatever the values are, so for them the result is exact; for another one that reads values it is an estimate.
2. A dry step on small tensors, scaled up: for optimizers with operators that ``meta`` does not have (SparseAdam's, kernels of others).
   Dimensions become distinct primes, so the size of a state tensor tells which dimensions it has::

       parameter (512, 64) ──► (3, 2);  state of 6 elements ──► 512 x 64, of 3 ──► 512, of 1 ──► 1

3. LBFGS: its history when full, by formula.
4. Neither works: as much as Adam's state.
"""

from lightning_rotor.optimizer_prediction.predict import (
    predict_optimizer_state_bytes,
    predict_optimizer_step_peak_bytes,
)
from lightning_rotor.optimizer_prediction.state_prediction import StatePrediction

__all__ = ["StatePrediction", "predict_optimizer_state_bytes", "predict_optimizer_step_peak_bytes"]
