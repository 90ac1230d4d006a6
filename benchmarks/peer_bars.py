"""Draws the step times of several programs as a bar chart."""

WIDTH, LEFT, RIGHT, BAR, GAP, HEAD = 760, 190, 90, 18, 6, 44
COLOURS = {True: "#2b6cb0", False: "#9ecaf3"}


def bars(steps):
    """`steps`: {model: {program: ms of a step}}; the names of our programs begin with "ours". The
    bars of a model are scaled to its slowest program."""
    lines, y = [], 16
    for model, times in steps.items():
        lines.append(f'<text x="16" y="{y + 14}" font-size="14">{model}: ms a step</text>')
        y += HEAD - 16
        scale = (WIDTH - LEFT - RIGHT) / max(times.values())
        for name, time in sorted(times.items(), key=lambda each: each[1]):
            width = time * scale
            lines += [f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{name}</text>',
                      f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" '
                      f'fill="{COLOURS[name.startswith("ours")]}"/>',
                      f'<text x="{LEFT + width + 6:.1f}" y="{y + 13}">{time:.0f}</text>']
            y += BAR + GAP
        y += 16
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
                      f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="12">',
                      f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *lines, "</svg>",
                      ""])
