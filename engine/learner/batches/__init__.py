"""The path of a batch to a rank: journal, sample files, their exchange between ranks, minibatches, micro batches of equal cost."""
