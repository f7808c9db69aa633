class Delayed:
    def __init__(self, wire, param, optimizer, delay):
        self.wire = wire
        self.param = param
        self.optimizer = optimizer
        self.delay = delay
        self.under_way = None

    def apply_oldest(self):
        gradient, handle = self.under_way.pop(0)
        handle.wait()
        self.param.grad = gradient
        self.optimizer.step()

    def end_of_window(self, gradient):
        handle = self.wire.launch(gradient)
        if self.under_way is None:
            self.under_way = []
            return
        self.under_way.append((gradient, handle))
        if len(self.under_way) > self.delay:
            self.apply_oldest()

    def flush(self):
        while self.under_way:
            self.apply_oldest()
