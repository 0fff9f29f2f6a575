"""`python -m ssd_pipelines` runs the `ssd-pipelines` command."""

from ssd_pipelines.cli import main


if __name__ == "__main__":
    main()
