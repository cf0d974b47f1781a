"""Physics, chemistry and equations: e3nn, mace-torch, torchdiffeq, neuraloperator, gpytorch, pythae."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.project_programs.program import STEPS, Run, Task, program


@program("e3nn")
def e3nn_gates(run: Run) -> None:
    """A network of gated points of e3nn (its model ``v2106``), on points in space."""
    torch.serialization.add_safe_globals([slice])  # in e3nn's table of constants
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    class Points(Task):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return (self.net({key: batch[key] for key in ("pos", "x", "batch")}) - batch["y"]).square().mean()

    net = SimpleNetwork(
        irreps_in="4x0e", irreps_out="2x0e", max_radius=1.2, num_neighbors=6.0, num_nodes=30.0, mul=8, layers=2, lmax=1
    )
    batches = [
        {"pos": 2 * torch.rand(60, 3), "x": torch.randn(60, 4), "batch": torch.arange(60) // 30, "y": torch.randn(2, 2)}
        for _ in range(STEPS)
    ]
    run.fit(Points(net), batches)


@program("mace-torch")
def mace_forces(run: Run) -> None:
    """MACE: energies and forces, which are gradients of energies, both in the loss."""
    torch.serialization.add_safe_globals([slice])  # in e3nn's table of constants
    import numpy as np
    from ase import Atoms
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools import torch_geometric

    class Forces(Task):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.loss = modules.WeightedEnergyForcesLoss(energy_weight=1.0, forces_weight=10.0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            output = self.net(batch.to_dict(), training=True, compute_force=True)
            return self.loss(pred=output, ref=batch)

    table = tools.AtomicNumberTable([1, 8])
    net = modules.ScaleShiftMACE(
        r_max=3.0, num_bessel=4, num_polynomial_cutoff=3, max_ell=2, num_interactions=2, num_elements=2, hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("8x0e"), gate=F.silu, atomic_energies=np.array([-1.0, -3.0]), avg_num_neighbors=6, atomic_numbers=table.zs,
        correlation=2, radial_type="bessel", atomic_inter_scale=1.0, atomic_inter_shift=0.0,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
    )  # fmt: skip
    generator = np.random.default_rng(0)
    molecules: list[Any] = []
    for number in range(STEPS * 2):
        waters = 4 + number % 3
        atoms = Atoms("OHH" * waters, positions=4 * generator.random((3 * waters, 3)))
        configuration = data.Configuration(
            atomic_numbers=atoms.numbers, positions=atoms.positions,
            properties={"energy": -1.0, "forces": generator.standard_normal((3 * waters, 3))}, property_weights={"energy": 1.0, "forces": 1.0},
        )  # fmt: skip
        molecules.append(data.AtomicData.from_config(configuration, z_table=table, cutoff=3.0))
    run.fit(Forces(net.float()), torch_geometric.dataloader.DataLoader(molecules, batch_size=2))


@program("torchdiffeq")
def neural_ode(run: Run) -> None:
    """A neural ODE, solved by dopri5 in the forward (examples/odenet_mnist.py without the adjoint)."""
    from torchdiffeq import odeint

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(9, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
            )

        def forward(self, time: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.cat([torch.ones_like(x[:, :1]) * time, x], 1))

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = Slope()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return odeint(self.slope, x, torch.tensor([0.0, 1.0]), rtol=1e-2, atol=1e-2)[1]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 4, 2, 1))
            self.solver = Solver()
            self.head = nn.Sequential(
                nn.GroupNorm(4, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.solver(self.down(x)))

    class Digits(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, digits = batch
            return F.cross_entropy(self.net(images), digits)

    run.fit(Digits(Net()), [(torch.randn(8, 1, 28, 28), torch.randint(10, (8,))) for _ in range(STEPS)])


@program("torchdiffeq")
def neural_ode_rk4(run: Run) -> None:
    """A neural ODE with fixed steps of rk4 (examples/ode_demo.py), called by the step itself."""
    from torchdiffeq import odeint

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

        def forward(self, time: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y**3)

    class Spiral(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            start, times, path = batch
            return (odeint(self.net, start, times, method="rk4") - path).abs().mean()

    times = torch.linspace(0.0, 2.0, 10)
    run.fit(Spiral(Slope()), [(torch.randn(200, 1, 2), times, torch.randn(10, 200, 1, 2)) for _ in range(STEPS)])


@program("neuraloperator")
def fourier_operator(run: Run) -> None:
    """FNO with complex weights in Fourier space, and a Sobolev loss."""
    from neuralop import H1Loss
    from neuralop.models import FNO

    class Darcy(Task):
        def __init__(self) -> None:
            super().__init__(
                FNO(
                    n_modes=(8, 8),
                    in_channels=1,
                    out_channels=1,
                    hidden_channels=16,
                    n_layers=4,
                    projection_channel_ratio=2,
                )
            )
            self.loss = H1Loss(d=2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return self.loss(self.net(x), y)

    run.fit(Darcy(), [(torch.randn(4, 1, 32, 32), torch.randn(4, 1, 32, 32)) for _ in range(STEPS)])


@program("gpytorch")
def deep_kernel(run: Run) -> None:
    """A Gaussian process on features of a network (deep kernel learning), exact marginal likelihood."""
    import gpytorch

    inputs, targets = torch.randn(200, 8), torch.randn(200)

    class Features(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
            self.features = Features()

        def forward(self, x: torch.Tensor) -> Any:
            found = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(found), self.kernel(found))

    class Likely(Task):
        def __init__(self) -> None:
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            super().__init__(Process(likelihood))
            self.likelihood = likelihood

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return -gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self.net)(self.net(x), y)

    run.fit(Likely(), [(inputs, targets)] * STEPS)


@program("pythae")
def beta_vae(run: Run) -> None:
    """BetaVAE of pythae, whose forward takes a data set's batch and returns its loss."""
    from pythae.data.datasets import DatasetOutput
    from pythae.models import BetaVAE, BetaVAEConfig
    from pythae.models.nn.benchmarks.mnist import Decoder_Conv_AE_MNIST, Encoder_Conv_VAE_MNIST

    class Autoencoder(Task):
        def training_step(self, images: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(DatasetOutput(data=images)).loss

    config = BetaVAEConfig(input_dim=(1, 28, 28), latent_dim=8, beta=2.0)
    net = BetaVAE(config, encoder=Encoder_Conv_VAE_MNIST(config), decoder=Decoder_Conv_AE_MNIST(config))
    run.fit(Autoencoder(net), [torch.rand(8, 1, 28, 28) for _ in range(STEPS)])
