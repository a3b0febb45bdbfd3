"""This package's attention inside of other libraries; each module here needs the library of its name."""
