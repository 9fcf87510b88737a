"""A language model of words, trained by truncated backpropagation and updates by hand."""

import os
import tempfile

import torch
from torch import nn

torch.manual_seed(1111)
TOKENS, WIDTH, BPTT, BATCH = 5000, 200, 35, 64


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, TOKENS)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(2, size, WIDTH), weight.new_zeros(2, size, WIDTH)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


model = RNNModel()
criterion = nn.NLLLoss()
corpus = torch.randint(0, TOKENS, (BPTT * 5 + 1, BATCH))
hidden = model.init_hidden(BATCH)
model.train()
for i in range(0, corpus.size(0) - 1, BPTT):
    data, targets = corpus[i : i + BPTT], corpus[i + 1 : i + 1 + BPTT].reshape(-1)
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-20)
    print("loss", loss.item())

with tempfile.TemporaryDirectory() as folder:
    torch.save(model, os.path.join(folder, "model.pt"))
