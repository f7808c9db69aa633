class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        if last:
            self.handles.append((b, self.wire.launch(b)))

    def finish(self):
        for b, handle in self.handles:
            handle.wait()
            self.optimizers[b].zero_grad()
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
