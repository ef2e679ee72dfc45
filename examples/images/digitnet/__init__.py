"""The project's own code. A recipe names its classes: `use: digitnet.model.DigitNet`."""
