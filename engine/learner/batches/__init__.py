"""The way of batches to a rank: journal, files of samples, their exchange between ranks, minibatches."""
