"""The experiments' workshop: data, models, training, what is kept on disk, measuring, results and figures."""
