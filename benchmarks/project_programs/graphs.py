"""Graphs: torch_geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.project_programs.program import STEPS, Run, Task, program

FEATURES, CLASSES = 32, 5


def one_graph(nodes: int = 1500, edges: int = 9000) -> list[Any]:
    """One graph at each step, as for Cora."""
    from torch_geometric.data import Data

    graph = Data(
        x=torch.randn(nodes, FEATURES),
        edge_index=torch.randint(nodes, (2, edges)),
        y=torch.randint(CLASSES, (nodes,)),
        train_mask=torch.rand(nodes) < 0.3,
    )
    return [graph] * STEPS


def many_graphs() -> Any:
    """A loader of torch_geometric over graphs of different sizes, so that each batch has another one."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs: list[Any] = []
    for number in range(STEPS * 16):
        nodes = 20 + number * 7 % 30
        graphs.append(
            Data(
                x=torch.randn(nodes, FEATURES),
                edge_index=torch.randint(nodes, (2, 4 * nodes)),
                edge_attr=torch.randn(4 * nodes, 8),
                y=torch.randint(CLASSES, (1,)),
                pos=torch.randn(nodes, 3),
                z=torch.randint(1, 10, (nodes,)),
            )
        )
    return DataLoader(graphs, batch_size=16)


class OnNodes(Task):
    """Classes of nodes, as in the examples of torch_geometric."""

    def training_step(self, graph: Any, batch_idx: int) -> torch.Tensor:
        """Cross entropy on the nodes that are known."""
        out = self.net(graph.x, graph.edge_index)
        return F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])


@program("torch_geometric")
def gcn_cora(run: Run) -> None:
    """GCN of two layers (examples/gcn.py)."""
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = GCNConv(FEATURES, 64)
            self.conv2 = GCNConv(64, CLASSES)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            x = F.dropout(x, p=0.5, training=self.training)
            x = self.conv1(x, edge_index).relu()
            x = F.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    run.fit(OnNodes(GCN()), one_graph())


@program("torch_geometric")
def gat_cora(run: Run) -> None:
    """GAT of three layers, from torch_geometric's models."""
    from torch_geometric.nn.models import GAT

    run.fit(OnNodes(GAT(FEATURES, 64, num_layers=3, out_channels=CLASSES, heads=4, dropout=0.6)), one_graph())


@program("torch_geometric")
def gin_on_batches(run: Run) -> None:
    """GIN with pooling over batches of graphs of different sizes (examples/mutag_gin.py)."""
    from torch_geometric.nn import MLP, global_add_pool
    from torch_geometric.nn.models import GIN

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = GIN(FEATURES, 64, num_layers=4, dropout=0.5, jk="cat")
            self.classifier = MLP([64, 64, CLASSES], norm="batch_norm", dropout=0.5)

        def forward(
            self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, batch_size: int
        ) -> torch.Tensor:
            x = global_add_pool(self.gnn(x, edge_index), batch, size=batch_size)
            return self.classifier(x)

    class OnGraphs(Task):
        def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(data.x, data.edge_index, data.batch, data.num_graphs), data.y)

    run.fit(OnGraphs(Net()), many_graphs())


@program("torch_geometric")
def edge_network(run: Run) -> None:
    """NNConv called three times, with a GRU and Set2Set (examples/qm9_nn_conv.py)."""
    from torch_geometric.nn import NNConv, Set2Set

    class Net(nn.Module):
        def __init__(self, dim: int = 32) -> None:
            super().__init__()
            self.lin0 = nn.Linear(FEATURES, dim)
            edges = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, dim * dim))
            self.conv = NNConv(dim, dim, edges, aggr="mean")
            self.gru = nn.GRU(dim, dim)
            self.set2set = Set2Set(dim, processing_steps=3)
            self.lin1 = nn.Linear(2 * dim, dim)
            self.lin2 = nn.Linear(dim, 1)

        def forward(self, data: Any) -> torch.Tensor:
            out = F.relu(self.lin0(data.x))
            h = out.unsqueeze(0)
            for _ in range(3):
                m = F.relu(self.conv(out, data.edge_index, data.edge_attr))
                out, h = self.gru(m.unsqueeze(0), h)
                out = out.squeeze(0)
            out = self.set2set(out, data.batch)
            return self.lin2(F.relu(self.lin1(out))).view(-1)

    class Regression(Task):
        def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
            return F.mse_loss(self.net(data), data.y.float())

    run.fit(Regression(Net()), many_graphs())


@program("torch_geometric")
def schnet_energies(run: Run) -> None:
    """SchNet on molecules with positions."""
    from torch_geometric.nn.models import SchNet

    class Energies(Task):
        def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
            return F.l1_loss(self.net(data.z, data.pos, data.batch).view(-1), data.y.float())

    class Near(nn.Module):
        """Edges between near points; torch_geometric's own needs a compiled package."""

        def forward(self, pos: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            is_near = (torch.cdist(pos, pos) < 2.0) & (batch[:, None] == batch) & ~torch.eye(len(pos), dtype=torch.bool)
            edges = is_near.nonzero().t()
            return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)

    net = SchNet(hidden_channels=48, num_filters=48, num_interactions=3, cutoff=2.0, interaction_graph=Near())
    run.fit(Energies(net), many_graphs())
