"""Sorts the nodes of a sparse graph into classes by two graph convolutions."""

import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(42)
nodes, features, classes = 20000, 300, 7


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.spmm(adj_mat, torch.mm(input_tensor, self.kernel))


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(features, 256), GraphConv(256, classes)

    def forward(self, input_tensor, adj_mat):
        x = F.relu(self.gc1(input_tensor, adj_mat))
        x = F.dropout(x, 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)


edges = torch.randint(0, nodes, (2, 100000))
adj_mat = torch.sparse_coo_tensor(edges, torch.full((100000,), 0.2), (nodes, nodes)).coalesce()
inputs, labels = torch.rand(nodes, features), torch.randint(0, classes, (nodes,))
idx_train = torch.arange(2000)
gcn = GCN()
optimizer = optim.Adam(gcn.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(5):
    gcn.train()
    optimizer.zero_grad()
    output = gcn(inputs, adj_mat)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
    gcn.eval()
    with torch.no_grad():
        gcn(inputs, adj_mat)
