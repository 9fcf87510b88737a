"""Tells whether two images show the same, by one network that sees both."""

import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(1)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.fc = nn.Sequential(
            nn.Linear(2 * 48 * 12 * 12, 128), nn.ReLU(inplace=True), nn.Linear(128, 1), nn.Sigmoid()
        )

    def forward_once(self, x):
        return torch.flatten(self.features(x), 1)

    def forward(self, input1, input2):
        return self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1))


model = SiameseNetwork()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
criterion = nn.BCELoss()
for step in range(5):
    first, second = torch.randn(160, 1, 28, 28), torch.randn(160, 1, 28, 28)
    targets = (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()
    optimizer.zero_grad()
    loss = criterion(model(first, second).squeeze(), targets)
    loss.backward()
    optimizer.step()
    print("loss", F.relu(loss).item())
