"""What a chain costs at each budget beside what else there is: `trt-layering bench`, its subjects, and its pictures."""
